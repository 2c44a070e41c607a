"""Adjacent short segments that the same rows share cost one pass, and a copy that is counted."""

import random

import mlx.core as mx
import pytest
from headwater.worker.engine.segments import KVSegment, LayerKV
from headwater.worker.engine.shared_kv import SharedPrefixRunner
from headwater.worker.engine.shared_kv.coalescing import MAX_COALESCED_TOKENS, Coalescer
from headwater.worker.engine.shared_kv.layout import by_level, find_spans

from tests.exactness.reference import assert_logits_close, logits_alone
from tests.exactness.workload import sequence
from tests.tiny_models import VOCABULARY_SIZE, tiny_model


def segment(num_tokens):
    """Return a segment whose keys tell which one it is."""
    kv = mx.random.normal((1, 1, num_tokens, 2))
    return KVSegment((LayerKV(kv, kv),))


def spans_of(*prefixes):
    return find_spans(prefixes)


def lengths(spans):
    return [span.segment.num_tokens for span in spans]


def test_a_chain_of_short_segments_becomes_one() -> None:
    """The copy holds the same tokens in the same order, for the same rows."""
    chain = [segment(num) for num in (5, 8, 3)]
    (span,) = Coalescer().coalesce(spans_of(chain, chain))

    assert (span.first_row, span.last_row) == (0, 2)
    keys = mx.concatenate([each.layers[0].keys for each in chain], axis=2)
    assert mx.array_equal(span.segment.layers[0].keys, keys)


def test_segments_of_different_rows_are_not_put_together() -> None:
    """Where a row leaves the trie's path, or joins it, a segment ends."""
    root, inner, leaf, last = (segment(num) for num in (4, 5, 6, 7))
    spans = Coalescer().coalesce(spans_of([root, inner, leaf, last], [root, inner], []))

    assert sorted(lengths(spans)) == [9, 13]
    assert by_level(spans) == [[spans[0]], [spans[1]]]


def test_long_segments_stay_and_copies_are_bounded() -> None:
    """A long segment is worth its pass; of short ones at most so many are copied into one."""
    chain = [segment(num) for num in [300, *[100] * 12, 200]]
    spans = Coalescer().coalesce(spans_of(chain))

    assert sum(lengths(spans)) == 1700
    assert lengths(spans)[0] == 300
    assert lengths(spans)[-1] == 200
    assert max(lengths(spans)) <= MAX_COALESCED_TOKENS
    assert len(spans) == 5


def test_a_copy_is_kept_as_long_as_it_is_asked_for() -> None:
    """Rows that come and go do not make the others' copy anew, and nobody's copy is held."""
    coalescer = Coalescer()
    chain, other = [segment(3), segment(4)], [segment(50)]
    (first,) = coalescer.coalesce(spans_of(chain, chain))

    again, _ = coalescer.coalesce(spans_of(chain, other))
    assert again.segment is first.segment

    coalescer.coalesce(spans_of(other))
    assert coalescer.arrays == []


def test_spans_are_put_on_as_few_levels_as_there_are_at_one_row() -> None:
    """A row with a deep path does not keep others' segments from standing beside its own."""
    deep = [segment(1) for _ in range(3)]
    levels = by_level(spans_of([deep[0]], deep, [segment(9)]))

    assert len(levels) == 3
    for level in levels:
        ranges = [(span.first_row, span.last_row) for span in level]
        assert ranges == sorted(ranges)


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_rows_over_many_small_nodes_get_the_logits_of_each_alone_in_one_pass(family) -> None:
    """Three rows behind 12 nodes: right, counted while they decode, and gone with them."""
    rng = random.Random(5)
    model = tiny_model(family)
    runner = SharedPrefixRunner(model)
    text = [rng.randrange(VOCABULARY_SIZE) for _ in range(72)]
    donor = sequence(text)
    runner.attach(donor, ())
    runner.prefill([donor], [text])
    chain = [runner.extract(donor, start, start + 6) for start in range(0, 72, 6)]
    runner.detach(donor)
    rows = [sequence([*text, last]) for last in range(3)]
    for row in rows:
        runner.attach(row, chain)

    logits = runner.decode(rows, mx.arange(3))

    for last, row in enumerate(logits):
        assert_logits_close(row, logits_alone(model, [*text, last])[-1])
    (level,) = runner._group.depths
    assert lengths(level) == [72]
    tails = sum(array.nbytes for array in runner._group.arrays)
    assert runner.nbytes == tails + sum(each.nbytes for each in chain)
    for row in rows:
        runner.detach(row)
    assert runner.nbytes == 0
