"""Only families that are known to compute rightly over shared prefixes do it."""

from importlib import import_module

import pytest
from headwater.worker.engine.parity import choose_runner
from headwater.worker.engine.shared_kv.families import families, shared_prefix_runner
from headwater.worker.engine.shared_kv.runner import SharedPrefixRunner
from headwater.worker.engine.shrinking import VOCABULARY_SIZE, small_model
from mlx.nn import Module

from tests.family_configs import config_of
from tests.family_trials import modules, try_all

BYPASSING = [
    *("gemma2", "gear", "plamo2", "deepseek_v41", "deepseek_v3", "deepseek_v32", "kimi_linear"),
    *("longcat_flash", "glm4_moe_lite", "mistral4", "bailing_hybrid", "bailing_moe_v3"),
    *("glm_moe_dsa", "minimax_m3_vl", "gemma4", "afm7", "gemma3n", "gpt_bigcode"),
]
"""Own softmax, attention behind the hook's back, latent keys, indices, layers that share keys."""


def small(family: str) -> Module:
    module = import_module(f"mlx_lm.models.{family}")
    return small_model(module, config_of(family, module))


@pytest.mark.parametrize("family", ["llama", "qwen3", "mixtral"])
def test_a_family_on_the_list_gets_the_runner(family) -> None:
    assert type(choose_runner(small(family), VOCABULARY_SIZE)) is SharedPrefixRunner


@pytest.mark.parametrize("family", BYPASSING)
def test_families_that_bypass_the_hook_are_not_allowed(family) -> None:
    assert family in families()["wrong"]


@pytest.mark.parametrize("family", ["gemma2", "deepseek_v3"])
def test_a_family_that_is_not_allowed_runs_on_another_runner(family) -> None:
    model = small(family)

    with pytest.raises(TypeError, match=f"{family} can't use shared prefixes"):
        shared_prefix_runner(model)
    assert type(choose_runner(model, VOCABULARY_SIZE)) is not SharedPrefixRunner


def test_a_class_that_is_not_from_mlx_lm_is_not_allowed() -> None:
    class Model(Module):
        pass

    with pytest.raises(TypeError, match="no family of mlx-lm"):
        shared_prefix_runner(Model())


def test_every_family_is_listed_once_with_a_reason_unless_it_is_right() -> None:
    listed = families()

    names = [*listed["right"], *listed["wrong"], *listed["untested"]]
    assert len(set(names)) == len(names)
    assert listed["right"] == sorted(listed["right"])
    assert all({**listed["wrong"], **listed["untested"]}.values())


@pytest.mark.long
def test_the_list_is_what_a_trial_of_every_family_finds() -> None:
    """On a difference look at the families that changed; `ops/list-families` writes the list."""
    assert try_all() == families()
    assert {name for name, _ in modules()} == {
        *families()["right"],
        *families()["wrong"],
        *families()["untested"],
    }
