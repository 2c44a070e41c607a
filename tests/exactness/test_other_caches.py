"""Stored prefixes of every family in mlx-lm whose cache can't be cut, whatever its class."""

import random
from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import pytest
from headwater.worker.engine.row_runner import RowRunner
from headwater.worker.engine.segment_codec import SegmentCodec
from headwater.worker.engine.segments import flatten
from headwater.worker.engine.shrinking import VOCABULARY_SIZE, small_model
from headwater.worker.engine.states import takes_state
from headwater.worker.segment import CacheKind
from mlx_lm.models.cache import make_prompt_cache

from tests.exactness.reference import ExactnessReport
from tests.exactness.test_snapshots import Chats, chat_settings
from tests.exactness.workload import sequence
from tests.family_configs import config_of
from tests.family_trials import modules
from tests.tiny_models import tiny_variant

STRIDE = 4
SOME = ["deepseek_v41", "falcon_h1", "llama4"]
"""Caches of their own, lists of caches, chunks: one family of each in the regular run."""


LLAMA4 = {
    "model_type": "llama4_text",
    "attention_bias": False,
    "attention_chunk_size": 8,
    "head_dim": 8,
    "hidden_size": 32,
    "interleave_moe_layer_step": 2,
    "intermediate_size": 32,
    "intermediate_size_mlp": 64,
    "max_position_embeddings": 1024,
    "num_attention_heads": 4,
    "num_experts_per_tok": 1,
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "num_local_experts": 4,
    "rms_norm_eps": 1e-5,
    "rope_scaling": None,
    "rope_theta": 1e4,
    "use_qk_norm": True,
    "vocab_size": VOCABULARY_SIZE,
}


def small(name: str) -> Any:
    """A tiny instance of a family."""
    if name == "llama4":
        return tiny_variant(name, text_config=LLAMA4)
    module = dict(modules())[name]
    assert module is not None
    return small_model(module, config_of(name, module))


def stateful_families() -> Iterator[tuple[str, Any]]:
    """Yield every family that can be built and whose cache can't be cut."""
    for name, module in modules():
        if module is not None:
            model = small_model(module, config_of(name, module))
            if RowRunner(model).cache_kind is CacheKind.SNAPSHOTS:
                yield name, model


def tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(VOCABULARY_SIZE) for _ in range(count)]


def check_strides(name: str, model: Any) -> None:
    """Restore at every stride from memory and, where the family allows it, through the host."""
    prompt = tokens(random.Random(0), 24)
    chunks = [prompt[start : start + STRIDE] for start in range(0, len(prompt), STRIDE)]
    runner = RowRunner(model)
    straight = sequence(prompt)
    runner.attach(straight, ())
    expected, stored = [], []
    for index, chunk in enumerate(chunks):
        expected.append(runner.prefill([straight], [chunk]))
        stored.append(runner.extract(straight, index * STRIDE, (index + 1) * STRIDE))
        mx.eval(expected[-1], stored[-1].arrays)
    expected.append(runner.decode([straight], mx.array([3])))
    for index in range(1, len(chunks) + 1):
        for prefix in prefixes(model, stored[:index]):
            restored = sequence(prompt)
            runner.attach(restored, prefix)
            actual = [runner.prefill([restored], [chunk]) for chunk in chunks[index:]]
            actual.append(runner.decode([restored], mx.array([3])))
            runner.detach(restored)
            for ours, theirs in zip(actual, expected[index:], strict=True):
                assert mx.array_equal(ours, theirs), (name, index)


def prefixes(model: Any, stored: list[Any]) -> Iterator[list[Any]]:
    """Yield what memory holds, and the same after a way through the host."""
    yield stored
    caches = make_prompt_cache(model)
    if all(takes_state(cache) for cache in flatten(caches)):
        codec = SegmentCodec(caches, stored[-1])
        spans = [(index * STRIDE, (index + 1) * STRIDE) for index in range(len(stored))]
        yield [
            codec.from_host(codec.to_host(stored[: index + 1], *span))
            for index, span in enumerate(spans)
        ]


def check_chats(name: str, model: Any, seeds: range) -> None:
    """Chats over stored states get the tokens of their prompts alone."""
    report = ExactnessReport()
    for seed in seeds:
        rng = random.Random(seed)
        system = tokens(rng, rng.randrange(8, 24))
        first = [sequence([*system, *tokens(rng, rng.randrange(1, 9))], 6) for _ in range(3)]
        chats = Chats(RowRunner(model), chat_settings(rng), rng, first, num_turns_left=4)
        chats.run()
        for row in chats.served:
            label = f"{name} seed {seed}"
            report.compare(model, row.job.prompt_token_ids, row.output_token_ids, label)
    report.check()


@pytest.mark.parametrize("name", SOME)
def test_families_with_caches_of_their_own_go_on_bit_for_bit(name: str) -> None:
    check_strides(name, small(name))


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_every_family_goes_on_bit_for_bit_from_memory_and_disk() -> None:
    names = set()
    for name, model in stateful_families():
        check_strides(name, model)
        names.add(name)

    assert names > set(SOME) - {"llama4"}


@pytest.mark.long
@pytest.mark.parametrize("name", SOME)
def test_a_hundred_chats_over_caches_of_their_own_are_exact(name: str) -> None:
    check_chats(name, small(name), range(100))
