"""Rows over keys and values in 8 or 4 bits: right for what they hold, small, refused where wrong."""

import random
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from headwater.schemas import CachedTokens
from headwater.worker.engine.kv_quantization import (
    KVQuantization,
    QuantizedRunner,
    _RoundedKVCache,
    choose_quantization,
)
from headwater.worker.engine.loading import LoadedModel, load_model
from headwater.worker.engine.random_model import _ARGUMENTS, write_random_model
from headwater.worker.engine.row_runner import RowRunner
from headwater.worker.engine.segment_codec import SegmentCodec
from headwater.worker.errors import StartupError
from headwater.worker.segment import CacheKind
from structlog.testing import capture_logs

from tests.device_memory import settled_active_memory
from tests.exactness.reference import ExactnessReport
from tests.exactness.test_snapshots import Chats, chat_settings, tokens
from tests.exactness.workload import sequence
from tests.tiny_models import tiny_variant
from tests.worker import test_cold_prefixes as cold

PROMPT = [5, 17, 99, 3, 64, 8, 1, 77, 30, 30, 12, 9, 50, 41, 2]
FAMILIES = ["llama", "gemma3_text", "qwen3_5"]
BITS = [8, 4]


def wide_model(family: str) -> Any:
    """Heads of 32 numbers, as many as share a scale."""
    return tiny_variant(family, head_dim=32)


def rounded(model: Any, bits: int):
    """The yardstick: the same model over floats that were rounded as the codes are."""
    quantization = KVQuantization(bits, 32)
    return lambda ids: model(ids, cache=quantization.make_caches(model, _RoundedKVCache))


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_row_computes_what_floats_that_were_rounded_alike_give(family: str, bits: int) -> None:
    model = wide_model(family)
    runner = QuantizedRunner(model, choose_quantization(model, bits))
    row = sequence(PROMPT)
    runner.attach(row, ())
    logits = [runner.prefill([row], [PROMPT[:6]])[0], runner.prefill([row], [PROMPT[6:10]])[0]]
    logits += [runner.decode([row], mx.array([token]))[0] for token in PROMPT[10:]]
    expected = rounded(model, bits)(mx.array([PROMPT]))[0]

    # A number on the edge between two codes may fall on either side: rounding grows to a step.
    for position, ours in zip((5, 9, *range(10, 15)), logits, strict=True):
        error = float(mx.max(mx.abs(ours - expected[position])))
        assert error < 0.1 * float(mx.std(expected))


def stored_nbytes(runner: RowRunner) -> int:
    """Check that a segment is all that is held of its row; return the bytes of its plain layers."""
    row = sequence(PROMPT)
    before = settled_active_memory()
    runner.attach(row, ())
    runner.prefill([row], [(PROMPT * 5)[:64]])
    segment = runner.extract(row, 0, 64)
    mx.eval(segment.arrays)
    runner.detach(row)
    held = settled_active_memory() - before

    # The allocator rounds each buffer up, large ones to pages: 64 tokens fill theirs.
    assert segment.nbytes <= held <= segment.nbytes + 256 * len(segment.arrays)
    plain = segment.plain if hasattr(segment, "plain") else dict(enumerate(segment.layers))
    return sum(array.nbytes for layer in plain.values() for array in layer)


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_stored_takes_a_fraction_and_is_all_that_is_held(family: str) -> None:
    model = wide_model(family)
    floats = stored_nbytes(RowRunner(model))

    for bits in BITS:
        # A float32 becomes 8 or 4 bits, and 32 of them share two of their own.
        runner = QuantizedRunner(model, KVQuantization(bits, 32))
        assert stored_nbytes(runner) == floats * (bits + 2) // 32


@pytest.mark.parametrize("bits", BITS)
def test_quantized_rows_can_be_cut_anywhere_and_go_on_bit_for_bit(bits: int) -> None:
    model = wide_model("llama")
    runner = QuantizedRunner(model, KVQuantization(bits, 32))
    assert runner.cache_kind is CacheKind.SEGMENTS
    straight = sequence(PROMPT)
    runner.attach(straight, ())
    runner.prefill([straight], [PROMPT[:11]])
    whole = runner.extract(straight, 0, 11)
    before = [array.tolist() for array in whole.arrays]
    first, rest = whole.split(4)
    codec = SegmentCodec(KVQuantization(bits, 32).make_caches(model), whole)
    on_disk = [codec.from_host(codec.to_host([first, rest], *span)) for span in ((0, 7), (7, 11))]
    for prefix in ([whole], [first, rest], on_disk):
        restored = sequence(PROMPT)
        runner.attach(restored, prefix)
        again = sequence(PROMPT)
        runner.attach(again, [whole])
        for chunk in (PROMPT[11:13], PROMPT[13:14], PROMPT[14:]):
            expected = runner.prefill([again], [chunk])
            assert mx.array_equal(runner.prefill([restored], [chunk]), expected)

    # Whoever went on from it changed nothing of it.
    assert [array.tolist() for array in whole.arrays] == before
    expected = runner.prefill([straight], [PROMPT[11:]])
    taker = sequence(PROMPT)
    runner.attach(taker, [first, rest])
    assert mx.array_equal(runner.prefill([taker], [PROMPT[11:]]), expected)


def test_states_of_a_hybrid_hold_their_attention_quantized_through_the_disk() -> None:
    model = wide_model("qwen3_5")
    quantization = KVQuantization(8, 32)
    runner = QuantizedRunner(model, quantization)
    straight = sequence(PROMPT)
    runner.attach(straight, ())
    stored = []
    for start, end in ((0, 4), (4, 9)):
        runner.prefill([straight], [PROMPT[start:end]])
        stored.append(runner.extract(straight, start, end))
    codec = SegmentCodec(quantization.make_caches(model), stored[0])
    hosts = [codec.to_host(stored[:1], 0, 4), codec.to_host(stored, 4, 9)]
    restored = sequence(PROMPT)
    runner.attach(restored, [codec.from_host(host) for host in hosts])

    assert runner.cache_kind is CacheKind.SNAPSHOTS
    assert {str(a.dtype) for host in hosts for a in host.arrays.values()} >= {"uint32"}
    expected = runner.prefill([straight], [PROMPT[9:]])
    assert mx.array_equal(runner.prefill([restored], [PROMPT[9:]]), expected)


def check_chats(family: str, seeds: range) -> None:
    """Chats over stored prefixes get what the yardstick gives for each prompt alone."""
    model = wide_model(family)
    # As above: a step of one key moves logits by some thousandths.
    report = ExactnessReport(near_tie=0.02)
    for seed in seeds:
        rng = random.Random(seed)
        system = tokens(rng, rng.randrange(8, 24))
        first = [sequence([*system, *tokens(rng, rng.randrange(1, 9))], 6) for _ in range(3)]
        runner = QuantizedRunner(model, KVQuantization(8, 32))
        chats = Chats(runner, chat_settings(rng), rng, first, num_turns_left=6)
        chats.run()
        assert chats.cache.statistics.num_reused_tokens > 0
        for row in chats.served:
            prompt = row.job.prompt_token_ids
            report.compare(rounded(model, 8), prompt, row.output_token_ids, f"seed {seed}")
    report.check()


@pytest.mark.parametrize("family", FAMILIES)
def test_chats_over_quantized_prefixes_are_right(family: str) -> None:
    check_chats(family, range(1))


@pytest.mark.long
@pytest.mark.parametrize("family", FAMILIES)
def test_a_hundred_chat_workloads_over_quantized_prefixes_are_right(family: str) -> None:
    check_chats(family, range(100, 200))


@pytest.mark.parametrize(
    ("family", "changes", "reason"),
    [
        ("mamba2", {}, r"no plain keys and values \(ArraysCache\)"),
        ("llama", {"head_dim": 8}, r"heads have \[8\] numbers"),
        ("gpt_oss", {"head_dim": 32}, "does not take them .*sinks"),
        ("gemma2", {"head_dim": 32, "query_pre_attn_scalar": 32}, "does not take them"),
    ],
)
def test_models_that_cannot_be_served_so_are_refused_with_the_reason(
    family: str, changes: dict[str, int], reason: str
) -> None:
    with pytest.raises(StartupError, match=f"can't be quantized: .*{reason}.*drop --kv-bits"):
        choose_quantization(tiny_variant(family, **changes), 8)


def test_a_model_that_reads_the_codes_as_numbers_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = wide_model("llama")
    make = KVQuantization.make_caches

    def with_other_scales(self: KVQuantization, model: Any, *kind: Any) -> Any:
        return make(self if kind else KVQuantization(2, 32), model, *kind)

    monkeypatch.setattr(KVQuantization, "make_caches", with_other_scales)
    with pytest.raises(StartupError, match="logits are off"):
        choose_quantization(model, 8)


def test_the_price_is_told_once() -> None:
    with capture_logs() as logs:
        choose_quantization(wide_model("llama"), 4)

    assert [(line["event"], line["bits"], line["group_size"]) for line in logs] == [
        ("kv_quantized", 4, 32)
    ]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder = tmp_path_factory.mktemp("wide")
    return load_model(str(write_random_model(folder, config={**_ARGUMENTS, "head_dim": 32})))


def test_a_restarted_worker_finds_quantized_prefixes_and_no_others(
    loaded: LoadedModel, tmp_path: Path
) -> None:
    system = cold.tokens(1, 2 * cold.BLOCK_TOKENS)
    job = cold.job("job", system + cold.tokens(2, 9))
    found, texts = {}, {}
    for number, bits in enumerate((8, 8, 4, None)):
        worker = cold.Worker(loaded, tmp_path, kv_bits=bits)
        worker.run(job)
        found[number] = worker.cached(job)
        texts[number] = worker.sink.tokens("job")
        worker.close()

    assert found == {
        0: CachedTokens(),
        1: CachedTokens(disk=len(system) + 8),
        2: CachedTokens(),
        3: CachedTokens(),
    }
    assert texts[0] == texts[1]


def test_the_memory_cache_keeps_the_forms_apart_and_counts_the_small_one(
    loaded: LoadedModel,
) -> None:
    job = cold.job("job", cold.tokens(1, 200))
    sizes, keys = [], []
    for bits in (None, 8, 4):
        worker = cold.Worker(loaded, None, kv_bits=bits)
        worker.run(job)
        sizes.append(worker.loop.kv_nbytes)
        keys.append(worker.loop._scheduler.root_key(sequence([1])))

    assert len(set(keys)) == 3
    assert np.allclose([size / sizes[0] for size in sizes], [1, 10 / 32, 6 / 32])
