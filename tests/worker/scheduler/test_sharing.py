import itertools
from collections.abc import Callable
from typing import Any

import pytest
from headwater.worker.scheduler import Footprint, SchedulerSettings
from headwater.worker.segment import CacheKind

Make = Callable[..., Any]

HEAD = list(range(100, 140))
"""A prefix of 40 tokens that prompts share."""


def small_chunks(**fields: Any) -> SchedulerSettings:
    return SchedulerSettings(prefill_chunk=10, **fields)


@pytest.mark.parametrize("kind", CacheKind)
def test_sixteen_prompts_compute_their_shared_prefix_once(
    kind: CacheKind, make_worker: Make, make_sequence: Make
) -> None:
    worker = make_worker(kind=kind)
    worker.add(*(make_sequence([*HEAD, index, index]) for index in range(16)))
    worker.run()

    assert worker.engine.num_prompt_tokens == 40 + 16 * 2
    assert len(worker.finished) == 16
    worker.check_baseline()


@pytest.mark.parametrize("kind", CacheKind)
def test_nested_prefixes_are_computed_once_each(
    kind: CacheKind, make_worker: Make, make_sequence: Make
) -> None:
    worker = make_worker(kind=kind)
    for index in range(16):
        group = [500 + index // 4] * 20
        worker.add(make_sequence([*HEAD, *group, 900 + index, 1, 2]))
    worker.run()

    assert worker.engine.num_prompt_tokens == 40 + 4 * 20 + 16 * 3


@pytest.mark.parametrize("kind", CacheKind)
def test_identical_prompts_compute_only_their_last_token_each(
    kind: CacheKind, make_worker: Make, make_sequence: Make
) -> None:
    worker = make_worker(kind=kind)
    worker.add(*(make_sequence(HEAD) for _ in range(8)))
    worker.run()

    assert worker.engine.num_prompt_tokens == 39 + 8


@pytest.mark.parametrize("kind", CacheKind)
def test_a_prompt_again_computes_one_token(
    kind: CacheKind, make_worker: Make, make_sequence: Make
) -> None:
    worker = make_worker(kind=kind)
    worker.add(make_sequence(HEAD))
    worker.run()
    computed = worker.engine.num_prompt_tokens
    again = make_sequence(HEAD)
    worker.add(again)
    worker.run()

    assert worker.engine.num_prompt_tokens == computed + 1
    assert again.num_cached_tokens == 39


@pytest.mark.parametrize("kind", CacheKind)
def test_the_next_turn_of_a_chat_reuses_prompt_and_answer(
    kind: CacheKind, make_worker: Make, make_sequence: Make
) -> None:
    worker = make_worker(kind=kind)
    first = make_sequence(HEAD, max_tokens=6)
    worker.add(first)
    worker.run()
    turn = make_sequence([*HEAD, *first.output_token_ids, 7, 8, 9])
    worker.add(turn)
    worker.run()

    # The answer's last token was sampled but never computed.
    assert turn.num_cached_tokens == 40 + 5


def test_nobody_shares_across_namespaces(make_worker: Make, make_sequence: Make) -> None:
    worker = make_worker()
    worker.add(*(make_sequence(HEAD, namespace=name) for name in ("a", "b")))
    worker.run()

    assert worker.engine.num_prompt_tokens == 80


def test_a_late_prompt_forks_while_the_leader_still_prefills(
    make_worker: Make, make_sequence: Make
) -> None:
    worker = make_worker(settings=small_chunks())
    leader = make_sequence([*HEAD, *range(100)])
    worker.add(leader)
    for _ in range(6):
        worker.step()
    taker = make_sequence([*HEAD, 1, 2])
    worker.add(taker)
    while not taker.num_cached_tokens:
        worker.step()

    assert taker.num_cached_tokens == 40
    assert leader.num_computed_tokens < leader.num_prompt_tokens
    worker.run()
    assert worker.engine.num_prompt_tokens == 140 + 2


@pytest.mark.parametrize("kind", CacheKind)
@pytest.mark.parametrize("steps_before", range(10))
@pytest.mark.parametrize("verb", ["finish", "drop"])
def test_a_leader_that_goes_at_any_point_hands_over(
    kind: CacheKind, steps_before: int, verb: str, make_worker: Make, make_sequence: Make
) -> None:
    worker = make_worker(kind=kind, settings=small_chunks(min_shared_tokens=1))
    leader = make_sequence([*HEAD, *range(10)])
    takers = [make_sequence([*HEAD, 50 + index]) for index in range(4)]
    worker.add(leader, *takers)
    for _ in range(steps_before):
        worker.step()
    getattr(worker.scheduler, verb)(leader)
    worker.run()

    assert {*takers} <= {*worker.finished}
    # What the leader had computed is kept if it was sound; the rest is computed once.
    assert worker.engine.num_prompt_tokens <= 50 + 4 + (40 if verb == "drop" else 0)
    worker.check_baseline()


def test_parked_sequences_can_be_cancelled(make_worker: Make, make_sequence: Make) -> None:
    worker = make_worker(settings=small_chunks())
    leader, taker, other = (make_sequence([*HEAD, index]) for index in range(3))
    worker.add(leader, taker, other)
    worker.step()
    assert worker.scheduler.num_parked == 2

    worker.scheduler.finish(taker)

    assert worker.scheduler.num_parked == 1
    worker.run()
    assert {*worker.finished} == {leader, other}
    assert taker.num_output_tokens == 0
    worker.check_baseline()


def test_a_commit_that_is_left_out_keeps_nobody_waiting(
    make_worker: Make, make_sequence: Make
) -> None:
    worker = make_worker(settings=small_chunks())
    worker.scheduler.commit = lambda *_: []
    worker.add(*(make_sequence([*HEAD, index]) for index in range(4)))
    worker.run()

    assert len(worker.finished) == 4


def test_a_short_common_start_is_not_worth_waiting_for(
    make_worker: Make, make_sequence: Make
) -> None:
    worker = make_worker(settings=SchedulerSettings(min_shared_tokens=16))
    worker.add(*(make_sequence([1, 2, 3, *range(index, index + 40)]) for index in (100, 200)))
    worker.step()

    assert worker.scheduler.num_running == 2


def test_takers_of_one_prefix_are_admitted_together(make_worker: Make, make_sequence: Make) -> None:
    worker = make_worker(settings=SchedulerSettings(max_batch=2))
    heads = {name: [start] * 30 for name, start in (("a", 1), ("b", 2), ("c", 3))}
    for index in range(12):
        name = "abc"[index % 3]
        worker.add(make_sequence([*heads[name], 100 + index, 5], max_tokens=2))
    worker.run()

    firsts = [sequence.job.prompt_token_ids[0] for sequence in worker.started]
    changes = sum(one != other for one, other in itertools.pairwise(firsts))
    assert changes <= 4


def test_running_rows_share_the_pieces_of_a_segment_that_was_cut(
    make_worker: Make, make_sequence: Make
) -> None:
    footprint = Footprint(bytes_per_token=10, shares_prefix=True)
    worker = make_worker(settings=SchedulerSettings(footprint=footprint, keeps_prompts=True))
    first = make_sequence([*HEAD, *range(30)], max_tokens=20)
    worker.add(first)
    for _ in range(3):
        worker.step()
    second = make_sequence([*HEAD, 77, 78], max_tokens=20)
    worker.add(second)
    worker.step()

    assert worker.engine.prefixes[first][0] is worker.engine.prefixes[second][0]
    assert worker.engine.num_shared_tokens(first) == 69
    worker.run()
    worker.check_baseline()


def test_rows_with_copies_of_their_own_pin_nothing(make_worker: Make, make_sequence: Make) -> None:
    worker = make_worker(settings=SchedulerSettings(keeps_prompts=True))
    worker.add(make_sequence(HEAD, max_tokens=20))
    for _ in range(4):
        worker.step()

    assert worker.scheduler.num_running == 1
    assert worker.cache.nbytes > 0 == worker.cache.pinned_nbytes


@pytest.mark.parametrize("kind", CacheKind)
def test_what_a_failed_sequence_left_in_the_cache_is_dropped(
    kind: CacheKind, make_worker: Make, make_sequence: Make
) -> None:
    worker = make_worker(kind=kind)
    worker.add(make_sequence(HEAD))
    worker.run()
    failed = make_sequence([*HEAD, *range(30)], max_tokens=20)
    worker.add(failed)
    for _ in range(3):
        worker.step()
    worker.scheduler.drop(failed)
    worker.run()
    again = make_sequence([*HEAD, *range(30)])
    worker.add(again)
    worker.run()

    assert failed.num_cached_tokens == again.num_cached_tokens
    worker.check_baseline()


@pytest.mark.parametrize("kind", CacheKind)
def test_one_row_at_a_time_shares_as_well(
    kind: CacheKind, make_worker: Make, make_sequence: Make
) -> None:
    worker = make_worker(kind=kind, settings=SchedulerSettings(max_batch=1))
    worker.add(*(make_sequence([*HEAD, *[1 + index // 2] * 20, index]) for index in range(4)))
    worker.run()

    assert worker.engine.num_prompt_tokens == 40 + 2 * 20 + 4
