"""LoRA adapters: rows of several in one batch, each as if its adapter were the only one."""

import json
from pathlib import Path

import mlx.core as mx
import pytest
from headwater.schemas import Failed, Finished, JobKind
from headwater.worker.engine.adapters import AdaptedModel, AdapterRunner, adapt
from headwater.worker.engine.merged_runner import MergedRunner
from headwater.worker.engine.row_runner import RowRunner
from headwater.worker.engine.shared_kv.runner import SharedPrefixRunner
from headwater.worker.errors import StartupError
from mlx.utils import tree_flatten
from mlx_lm.tuner.utils import linear_to_lora_layers

from tests.exactness.reference import greedy_alone
from tests.tiny_models import tiny_model
from tests.worker.loop_bench import Bench, claim

PROMPT = (5, 9, 17, 3, 44, 9) * 5
LORA = {"rank": 4, "scale": 20.0, "dropout": 0.1}


def write_adapter(directory: Path, seed: int, family: str = "llama") -> Path:
    """Write what a training run leaves, with random weights."""
    model = tiny_model(family)
    linear_to_lora_layers(model, 2, LORA)
    mx.random.seed(seed)
    lora = {
        name: mx.random.normal(value.shape) * 0.3
        for name, value in tree_flatten(model.parameters())
        if name.rsplit(".", 1)[-1] in ("lora_a", "lora_b")
    }
    directory.mkdir()
    mx.save_safetensors(str(directory / "adapters.safetensors"), lora)
    config = {"fine_tune_type": "lora", "num_layers": 2, "lora_parameters": LORA}
    (directory / "adapter_config.json").write_text(json.dumps(config))
    return directory


@pytest.fixture
def directories(tmp_path: Path) -> dict[str, Path]:
    return {name: write_adapter(tmp_path / name, seed) for seed, name in enumerate(("a", "b"))}


class Adapted(Bench):
    """A loop with the model and two adapters of it."""

    def __init__(self, runner, directories: dict[str, Path]) -> None:
        self.adapted: dict[str, AdaptedModel] = {}

        def build(model):
            for alias, directory in directories.items():
                self.adapted[alias] = adapt(model, "base", directory)
            twins = {alias: runner(each.model) for alias, each in self.adapted.items()}
            return AdapterRunner(runner(model), twins)

        super().__init__(runner=build, adapters=tuple(directories))

    def alone(self, adapter: str | None, prompt=PROMPT, num_tokens: int = 8) -> list[int]:
        model = self.model if adapter is None else self.adapted[adapter].model
        return greedy_alone(model, prompt, num_tokens)


@pytest.fixture(params=[MergedRunner, SharedPrefixRunner, RowRunner])
def bench(request, directories) -> Adapted:
    return Adapted(request.param, directories)


def test_rows_of_several_adapters_share_a_batch_and_nothing_else(bench: Adapted) -> None:
    jobs = {f"{adapter}-{n}": adapter for n in range(2) for adapter in ("a", None, "b")}
    for job_id, adapter in jobs.items():
        bench.loop.admit(claim(job_id, prompt=PROMPT, adapter=adapter))
    bench.run()

    expected = {adapter: bench.alone(adapter) for adapter in ("a", "b", None)}
    assert len({tuple(tokens) for tokens in expected.values()}) == 3
    for job_id, adapter in jobs.items():
        assert bench.sink.tokens(job_id) == expected[adapter]


def test_the_prefix_cache_is_kept_apart_by_adapter(bench: Adapted) -> None:
    for job_id, adapter in (("one", "a"), ("two", "a"), ("three", "b"), ("four", None)):
        bench.loop.admit(claim(job_id, prompt=PROMPT, adapter=adapter))
        bench.run()

    cached = {
        job_id: end.usage.cached_tokens
        for job_id, end in bench.sink.ends.items()
        if isinstance(end, Finished)
    }
    assert cached == {"one": 0, "two": len(PROMPT) - 1, "three": 0, "four": 0}


def test_scores_are_the_adapters_own(bench: Adapted) -> None:
    greedy = tuple(bench.alone("b", num_tokens=3))
    for job_id, adapter in (("of-b", "b"), ("of-base", None)):
        fields = {"kind": JobKind.SCORE, "max_tokens": 1, "continuations": (greedy,)}
        bench.loop.admit(claim(job_id, prompt=PROMPT, adapter=adapter, **fields))
    bench.run()

    ends = {job_id: bench.sink.ends[job_id] for job_id in ("of-b", "of-base")}
    assert {job_id: end.scores[0].is_greedy for job_id, end in ends.items()} == {
        "of-b": True,
        "of-base": False,
    }


def test_a_job_for_an_adapter_that_is_not_there_fails_and_names_those_that_are(bench) -> None:
    bench.loop.admit(claim(adapter="c"))

    end = bench.sink.ends["j"]
    assert isinstance(end, Failed)
    assert (end.code, "it has: a, b" in end.message) == ("unknown_adapter", True)


def test_a_models_twin_shares_its_weights_and_leaves_it_as_it_was(directories) -> None:
    model = tiny_model("llama")
    before = greedy_alone(model, PROMPT, 8)

    twin = adapt(model, "base", directories["a"]).model

    assert twin.model.embed_tokens.weight is model.model.embed_tokens.weight
    assert twin.layers[0].self_attn.q_proj.linear.weight is model.layers[0].self_attn.q_proj.weight
    assert greedy_alone(model, PROMPT, 8) == before


def test_fingerprints_tell_adapters_and_their_models_apart(directories) -> None:
    model = tiny_model("llama")
    prints = {
        adapt(model, base, directories[name]).fingerprint
        for base in ("base", "other")
        for name in ("a", "b")
    }

    assert len(prints) == 4
    assert adapt(model, "base", directories["a"]).fingerprint in prints


def test_a_directory_without_an_adapter_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"adapter_config\.json and adapters\.safetensors"):
        adapt(tiny_model("llama"), "base", tmp_path)


def test_another_models_adapter_is_a_clear_error(tmp_path: Path) -> None:
    directory = write_adapter(tmp_path / "x", 0, family="gemma3_text")

    with pytest.raises(StartupError, match="does not fit the model"):
        adapt(tiny_model("llama"), "base", directory)


def test_an_adapter_in_16_bits_computes_in_float32_on_a_cpu(directories) -> None:
    path = directories["a"] / "adapters.safetensors"
    half = {name: value.astype(mx.float16) for name, value in mx.load(str(path)).items()}
    mx.save_safetensors(str(path), half)

    twin = adapt(tiny_model("llama"), "base", directories["a"]).model

    assert twin.layers[0].self_attn.q_proj.lora_a.dtype == mx.float32
