"""Small random instances show all that their family's models do."""

from importlib import import_module

import mlx.core as mx
import pytest
from headwater.worker.engine.shrinking import NotShrinkable, shrink, small_model
from mlx_lm.models.cache import KVCache, RotatingKVCache

GEMMA3 = {
    "model_type": "gemma3_text",
    "hidden_size": 2560,
    "intermediate_size": 10240,
    "num_hidden_layers": 34,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "sliding_window": 1024,
    "sliding_window_pattern": 6,
    "vocab_size": 262208,
    "quantization": {"bits": 4, "group_size": 64},
}


def test_a_released_models_config_gives_a_small_one_with_layers_of_each_kind() -> None:
    model = small_model(import_module("mlx_lm.models.gemma3_text"), GEMMA3)

    caches = model.make_cache()
    assert [type(cache) for cache in caches] == [RotatingKVCache] * 5 + [KVCache]
    assert {cache.max_size for cache in caches[:5]} == {8}
    assert model(mx.array([[1, 2, 3]])).shape == (1, 3, 128)


def test_the_same_seed_gives_the_same_weights() -> None:
    family = import_module("mlx_lm.models.gemma3_text")
    tokens = mx.array([[5, 6, 7]])

    first, second, other = (small_model(family, GEMMA3, seed)(tokens) for seed in (1, 1, 2))

    assert mx.array_equal(first, second)
    assert not mx.array_equal(first, other)


def test_lists_with_an_entry_a_layer_are_cut_behind_the_last_kind() -> None:
    kinds = ["a", "a", "a", "a", "a", "b", "a", "b"]

    small = shrink({"num_hidden_layers": 8, "layer_types": kinds, "eos_token_id": [1, 2]})

    assert small == {"num_hidden_layers": 6, "layer_types": kinds[:6], "eos_token_id": [1, 2]}


def test_what_a_model_does_without_stays_switched_off() -> None:
    without = {"sliding_window": None, "q_lora_rank": None, "num_experts": 0}

    assert shrink(without) == without


def test_the_text_part_of_a_model_is_made_small_too() -> None:
    assert shrink({"text_config": {"hidden_size": 4096}}) == {"text_config": {"hidden_size": 32}}


def test_factors_for_each_dimension_of_a_head_are_dropped() -> None:
    assert shrink({"rope_scaling": {"type": "longrope", "short_factor": [1.0] * 48}}) == {
        "rope_scaling": None
    }


@pytest.mark.parametrize(
    "config", [{"model_type": "llama"}, {**GEMMA3, "model_type": "llama", "head_dim": 10**5}]
)
def test_a_config_that_can_not_be_made_small_is_refused(config) -> None:
    with pytest.raises(NotShrinkable):
        small_model(import_module("mlx_lm.models.llama"), config)
