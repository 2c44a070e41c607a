"""Rows of recurrent layers keep their states apart, whoever computes beside them."""

import random

import mlx.core as mx
import pytest
from headwater.worker.engine.shared_kv import SharedPrefixRunner
from headwater.worker.engine.shared_kv.recurrent import StateBatch
from headwater.worker.engine.states import StateSegment
from headwater.worker.segment import CacheKind

from tests.exactness.reference import assert_logits_close, logits_alone
from tests.exactness.workload import sequence
from tests.tiny_models import VOCABULARY_SIZE, tiny_model

HYBRIDS = ["qwen3_5", "qwen3_next"]


def draw(rng: random.Random, num_tokens: int) -> list[int]:
    return [rng.randrange(VOCABULARY_SIZE) for _ in range(num_tokens)]


def test_a_row_without_a_state_starts_from_zeros_beside_one_that_has_some() -> None:
    rows = [{3: (mx.ones((1, 2)), mx.full((1, 4), 2.0))}, {}]

    batch = StateBatch({3: 2}, rows)

    assert [array.tolist() for array in batch.caches[0].cache] == [
        [[1, 1], [0, 0]],
        [[2, 2, 2, 2], [0, 0, 0, 0]],
    ]
    assert [array.tolist() for array in batch.row(0)[3]] == [[[1, 1]], [[2, 2, 2, 2]]]


def test_a_new_row_has_no_state_until_it_computes() -> None:
    batch = StateBatch({0: 2}, [{}])

    assert batch.caches[0].cache == [None, None]
    assert batch.row(0) == {0: (None, None)}
    assert batch.arrays == []


@pytest.mark.parametrize("family", HYBRIDS)
def test_ragged_chunks_leave_each_row_the_state_behind_its_last_token(family) -> None:
    model, rng = tiny_model(family), random.Random(1)
    runner = SharedPrefixRunner(model)
    texts = [draw(rng, num) for num in (12, 10, 11)]
    rows = [sequence(text) for text in texts]
    for row in rows:
        runner.attach(row, ())
    runner.prefill(rows, [text[:num] for text, num in zip(texts, (6, 5, 6), strict=True)])
    logits = runner.prefill(rows, [text[num:] for text, num in zip(texts, (6, 5, 6), strict=True)])

    assert runner.padding.num_pads > 0
    for row, text in zip(logits, texts, strict=True):
        assert_logits_close(row, logits_alone(model, text)[-1])


@pytest.mark.parametrize("family", HYBRIDS)
def test_takers_of_one_state_leave_it_as_it_was(family) -> None:
    model, rng = tiny_model(family), random.Random(2)
    runner = SharedPrefixRunner(model)
    shared = draw(rng, 20)
    leader = sequence([*shared, 1])
    runner.attach(leader, ())
    runner.prefill([leader], [shared])
    stored = runner.extract(leader, 0, len(shared))
    assert runner.cache_kind is CacheKind.SNAPSHOTS
    assert isinstance(stored, StateSegment)

    for _ in range(2):
        takers = [sequence([*shared, token]) for token in (5, 6)]
        for taker in takers:
            runner.attach(taker, (stored,))
        logits = runner.prefill(takers, [[5], [6]])
        for row, token in zip(logits, (5, 6), strict=True):
            assert_logits_close(row, logits_alone(model, [*shared, token])[-1])
        for taker in takers:
            runner.detach(taker)


def test_a_state_is_where_the_row_stands_and_nowhere_else() -> None:
    runner = SharedPrefixRunner(tiny_model("qwen3_5"))
    row = sequence([1, 2, 3, 4])
    runner.attach(row, ())
    runner.prefill([row], [[1, 2, 3]])
    stored = runner.extract(row, 0, 3)

    with pytest.raises(IndexError, match="the state at 2"):
        runner.extract(row, 0, 2)
    with pytest.raises(ValueError, match="no row can go on"):
        runner.attach(sequence([1, 2]), stored.split(2)[:1])


def test_a_rows_states_are_counted_once_it_has_its_own() -> None:
    model = tiny_model("qwen3_5")
    runner = SharedPrefixRunner(model)
    rows = [sequence([1] * 9) for _ in range(2)]
    runner.attach(rows[0], ())
    runner.prefill([rows[0]], [[1] * 8])
    stored = runner.extract(rows[0], 0, 8)
    alone = runner.nbytes
    runner.attach(rows[1], (stored,))

    assert runner.nbytes == alone
    runner.prefill([rows[1]], [[1]])
    state_nbytes = sum(a.nbytes for cache in stored.states.values() for a in cache.cache)
    assert runner.nbytes >= alone + state_nbytes
    for row in rows:
        runner.detach(row)
    assert runner.nbytes == 0


def test_what_a_row_shares_is_the_same_object_whatever_state_is_added() -> None:
    model = tiny_model("qwen3_5")
    runner = SharedPrefixRunner(model)
    row = sequence([1] * 9)
    runner.attach(row, ())
    runner.prefill([row], [[1] * 8])
    whole = runner.extract(row, 0, 8)
    first, rest = whole.split(5)

    again = first.resumable_as(rest)

    assert again.shared is first.shared
    assert again.is_resumable


@pytest.mark.parametrize("num_kept", [0, 2])
def test_a_row_that_leaves_its_group_takes_its_state_along(num_kept) -> None:
    """A rebase in the middle of decoding, and a prefill behind it."""
    model, rng = tiny_model("qwen3_5"), random.Random(4)
    runner = SharedPrefixRunner(model)
    texts = [draw(rng, 150), draw(rng, 4)]
    rows = [sequence([*text, *draw(rng, 8)]) for text in texts]
    for row, text in zip(rows, texts, strict=True):
        runner.attach(row, ())
        runner.prefill([row], [text])
    stored = runner.extract(rows[0], 0, 150)
    for at in range(2):
        given = [
            row.tokens(len(text) + at, len(text) + at + 1)[0]
            for row, text in zip(rows, texts, strict=True)
        ]
        runner.decode(rows, mx.array(given))
    if not num_kept:
        stored = runner.extract(rows[0], 0, 152)

    runner.rebase(rows[0], (stored,))
    decoded = runner.decode(rows[:1], mx.array(rows[0].tokens(152, 153)))
    prefilled = runner.prefill(rows[:1], [rows[0].tokens(153, 156)])

    assert_logits_close(decoded[0], logits_alone(model, rows[0].tokens(0, 153))[-1])
    assert_logits_close(prefilled[0], logits_alone(model, rows[0].tokens(0, 156))[-1])
