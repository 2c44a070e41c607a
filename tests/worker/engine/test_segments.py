"""Segments own their memory, count it truly, and continue exactly where they were cut."""

import mlx.core as mx
import pytest
from headwater.worker.engine.merged_runner import MergedRunner
from headwater.worker.engine.row_runner import RowRunner
from headwater.worker.engine.segments import classify
from headwater.worker.engine.states import StateSegment, restore_states
from headwater.worker.prefix_cache import PrefixCache
from headwater.worker.segment import CacheKind
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    ChunkedKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
    make_prompt_cache,
)

from tests.device_memory import settled_active_memory
from tests.exactness.reference import assert_logits_close, logits_alone
from tests.exactness.workload import sequence
from tests.tiny_models import TINY_FAMILIES, WINDOW, tiny_model

PROMPT = [5, 17, 99, 3, 64, 8, 1, 77, 30, 30, 12, 9, 50, 41, 2]
RUNNERS = [RowRunner, MergedRunner]
SNAPSHOT_FAMILIES = ["qwen3_5", "qwen3_next", "gemma3_text", "gpt_oss", "mamba2"]


def test_only_plain_keys_and_values_in_every_layer_can_be_cut_anywhere() -> None:
    class Subclass(KVCache):
        pass

    for plain in (CacheList(KVCache(), KVCache()), QuantizedKVCache()):
        assert classify([KVCache(), plain]) is CacheKind.SEGMENTS
    for other in (
        RotatingKVCache(8),
        ArraysCache(2),
        ChunkedKVCache(8),
        Subclass(),
        CacheList(KVCache(), ArraysCache(1)),
    ):
        assert classify([KVCache(), other]) is CacheKind.SNAPSHOTS


@pytest.mark.parametrize("family", TINY_FAMILIES)
def test_each_family_is_classified_by_the_caches_that_it_makes(family) -> None:
    expected = CacheKind.SEGMENTS if family in ("llama", "qwen3_moe") else CacheKind.SNAPSHOTS
    assert RowRunner(tiny_model(family)).cache_kind is expected


@pytest.mark.parametrize("runner_class", RUNNERS)
@pytest.mark.parametrize("cut", [1, 7, 13])
def test_a_segment_cut_in_halves_continues_as_the_row_it_came_from(runner_class, cut) -> None:
    model = tiny_model("llama")
    runner = runner_class(model)
    donor, taker = sequence(PROMPT), sequence(PROMPT)
    runner.attach(donor, ())
    runner.prefill([donor], [PROMPT[:-1]])
    runner.decode([donor], mx.array(PROMPT[-1:]))
    segment = runner.extract(donor, 0, 14)

    runner.attach(taker, segment.split(cut))
    logits = runner.prefill([taker], [PROMPT[14:]])

    assert_logits_close(logits[0], logits_alone(model, PROMPT)[-1])


def test_a_segment_of_a_batched_row_holds_that_row_and_no_padding() -> None:
    runner = MergedRunner(tiny_model("llama"))
    alone = RowRunner(tiny_model("llama"))
    rows = [sequence(PROMPT), sequence(PROMPT[3:8])]
    for row in rows:
        runner.attach(row, ())
        alone.attach(row, ())
        for target in (runner, alone):
            target.prefill([row], [row.job.prompt_token_ids])
    for target in (runner, alone):
        target.decode(rows, mx.array([4, 9]))

    batched, single = (target.extract(rows[1], 2, 6) for target in (runner, alone))

    assert batched.num_tokens == 4
    for ours, theirs in zip(batched.arrays, single.arrays, strict=True):
        assert_logits_close(ours, theirs)


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt_oss", "qwen3_5"])
def test_a_segment_does_not_keep_the_row_alive_and_counts_the_bytes_that_it_holds(family) -> None:
    runner = RowRunner(tiny_model(family))
    row = sequence(PROMPT * 40)
    before = settled_active_memory()
    runner.attach(row, ())
    runner.prefill([row], [PROMPT * 2])
    segment = runner.extract(row, 0, 30)
    mx.eval(segment.arrays)
    runner.prefill([row], [PROMPT * 38])
    mx.eval(runner.state([row]))
    runner.detach(row)

    held = settled_active_memory() - before

    # The allocator rounds each buffer up; a row would be more than twice as large.
    assert segment.nbytes <= held <= segment.nbytes + 256 * len(segment.arrays)


@pytest.mark.parametrize("runner_class", RUNNERS)
@pytest.mark.parametrize("family", TINY_FAMILIES)
def test_what_was_stored_does_not_change_when_donor_and_takers_go_on(family, runner_class) -> None:
    model = tiny_model(family)
    runner = runner_class(model)
    donor = sequence(PROMPT)
    runner.attach(donor, ())
    runner.prefill([donor], [PROMPT[:10]])
    stored = runner.extract(donor, 0, 10)
    mx.eval(stored.arrays)
    before = [array.tolist() for array in stored.arrays]
    results = []
    for _ in range(2):
        taker = sequence(PROMPT)
        runner.attach(taker, (stored,))
        runner.prefill([taker], [PROMPT[10:14]])
        results.append(runner.decode([taker, donor], mx.array([PROMPT[14], 1]))[0])

    assert [array.tolist() for array in stored.arrays] == before
    assert mx.array_equal(*results)
    assert_logits_close(results[0], logits_alone(model, PROMPT)[-1])


@pytest.mark.parametrize("family", TINY_FAMILIES)
def test_a_restored_row_continues_bit_for_bit_with_the_same_chunks(family) -> None:
    runner = RowRunner(tiny_model(family))
    straight, restored = sequence(PROMPT), sequence(PROMPT)
    runner.attach(straight, ())
    runner.prefill([straight], [PROMPT[:9]])
    stored = runner.extract(straight, 0, 9)
    runner.attach(restored, (stored,))
    for chunk in (PROMPT[9:12], PROMPT[12:13], PROMPT[13:]):
        expected = runner.prefill([straight], [chunk])
        assert mx.array_equal(runner.prefill([restored], [chunk]), expected)


@pytest.mark.parametrize("runner_class", RUNNERS)
def test_a_state_is_only_given_where_the_row_stands(runner_class) -> None:
    runner = runner_class(tiny_model("mamba2"))
    row = sequence(PROMPT)
    runner.attach(row, ())
    runner.prefill([row], [PROMPT[:5]])
    for end in (4, 6):
        with pytest.raises(IndexError, match="has computed 5"):
            runner.extract(row, 0, end)


def test_a_range_that_was_not_computed_is_refused() -> None:
    runner = RowRunner(tiny_model("llama"))
    row = sequence(PROMPT)
    runner.attach(row, ())
    runner.prefill([row], [PROMPT[:5]])
    for start, end in ((0, 6), (3, 3), (-1, 2)):
        with pytest.raises(IndexError):
            runner.extract(row, start, end)
    for position in (0, 5):
        with pytest.raises(ValueError, match="can't split"):
            runner.extract(row, 0, 5).split(position)


@pytest.mark.parametrize("family", SNAPSHOT_FAMILIES)
def test_adjacent_states_continue_bit_for_bit_as_the_row_they_were_taken_from(family) -> None:
    model = tiny_model(family)
    runner = RowRunner(model)
    straight = sequence(PROMPT)
    runner.attach(straight, ())
    stored, position = [], 0
    for end in (3, 4, 9):
        runner.prefill([straight], [PROMPT[position:end]])
        stored.append(runner.extract(straight, position, end))
        position = end
    expected = runner.prefill([straight], [PROMPT[9:]])

    restored = sequence(PROMPT)
    runner.attach(restored, stored)
    assert mx.array_equal(runner.prefill([restored], [PROMPT[9:]]), expected)


@pytest.mark.parametrize("family", SNAPSHOT_FAMILIES)
def test_a_cut_leaves_a_state_at_its_end_only(family) -> None:
    runner = RowRunner(tiny_model(family))
    row, other = sequence(PROMPT), sequence(PROMPT)
    for one in (row, other):
        runner.attach(one, ())
        runner.prefill([one], [PROMPT[:9]])
    whole = runner.extract(row, 0, 9)
    first, rest = whole.split(4)

    assert (first.is_resumable, rest.is_resumable, whole.is_resumable) == (False, True, True)
    assert (first.num_tokens, rest.num_tokens) == (4, 5)
    with pytest.raises(ValueError, match="no row can go on"):
        restore_states(make_prompt_cache(tiny_model(family)), [first])
    with pytest.raises(ValueError, match="can't split"):
        whole.split(9)
    taker = sequence(PROMPT)
    runner.attach(taker, (first, rest))
    assert mx.array_equal(*(runner.prefill([one], [PROMPT[9:]]) for one in (taker, row)))
    # The head gets a state of its own when somebody comes by who stands there.
    again = sequence(PROMPT)
    runner.attach(again, ())
    runner.prefill([again], [PROMPT[:4]])
    head = first.resumable_as(runner.extract(again, 0, 4))
    third = sequence(PROMPT)
    runner.attach(third, (head,))
    assert mx.array_equal(*(runner.prefill([one], [PROMPT[4:]]) for one in (third, again)))


@pytest.mark.parametrize("family", ["gemma3_text", "gpt_oss"])
def test_a_window_is_stored_without_the_chunk_behind_it_and_without_unused_capacity(family) -> None:
    runner = RowRunner(tiny_model(family))
    sizes = []
    for prefilled, decoded in ((40, 0), (3, 1), (20, 11), (WINDOW, 1)):
        row = sequence(PROMPT * 4)
        runner.attach(row, ())
        runner.prefill([row], [(PROMPT * 4)[:prefilled]])
        for token in (PROMPT * 4)[prefilled : prefilled + decoded]:
            runner.decode([row], mx.array([token]))
        states = runner.extract(row, 0, prefilled + decoded).states
        windows = [cache for cache in states.values() if isinstance(cache, RotatingKVCache)]
        sizes.append({cache.keys.shape[2] for cache in windows})

    assert sizes == [{WINDOW}, {4}, {WINDOW}, {WINDOW}]


def test_states_share_what_plain_layers_hold() -> None:
    """A prefix of 64 states holds their recurrent parts and one copy of keys and values."""
    runner = RowRunner(tiny_model("qwen3_5"))
    row = sequence(PROMPT)
    runner.attach(row, ())
    cache = PrefixCache(CacheKind.SNAPSHOTS)
    tokens = [index % 100 for index in range(64 * 8)]
    for start in range(0, len(tokens), 8):
        runner.prefill([row], [tokens[start : start + 8]])
        cache.insert("k", tokens[: start + 8], start, runner.extract(row, start, start + 8))
    leaves = list(runner._rows[row].caches)
    recurrent = sum(leaf.nbytes for leaf in leaves if isinstance(leaf, ArraysCache))
    plain = [leaf.keys_and_values() for leaf in leaves if isinstance(leaf, KVCache)]
    attention = sum(array.nbytes for pair in plain for array in pair)

    assert cache.num_nodes == 64
    assert attention > 0
    assert cache.nbytes <= 1.05 * (64 * recurrent + attention)


@pytest.mark.parametrize("family", SNAPSHOT_FAMILIES)
def test_untouched_caches_give_a_segment_that_restores_to_untouched_caches(family) -> None:
    model = tiny_model(family)
    segment = StateSegment.capture(make_prompt_cache(model), 0, 0)
    caches = make_prompt_cache(model)
    restore_states(caches, [segment])

    assert segment.nbytes == 0
    assert all(cache.empty() for cache in caches)
