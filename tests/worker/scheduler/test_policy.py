import sys
from collections.abc import Callable
from typing import Any

import pytest
from headwater.worker.scheduler import Footprint, SchedulerSettings
from headwater.worker.segment import CacheKind
from headwater.worker.sequence import Readout, Sequence, SequenceStatus

Make = Callable[..., Any]


def prompt(first: int, length: int = 40) -> list[int]:
    """A prompt that shares nothing with one of another *first*."""
    return [first * 1_000 + index for index in range(length)]


def test_an_idle_scheduler_plans_nothing(make_worker: Make) -> None:
    worker = make_worker()
    worker.step()

    assert not worker.plan.has_work
    assert worker.scheduler.is_idle


def test_no_more_rows_than_the_batch_allows(make_worker: Make, make_sequence: Make) -> None:
    worker = make_worker(settings=SchedulerSettings(max_batch=3))
    worker.add(*(make_sequence(prompt(index)) for index in range(10)))
    while not worker.scheduler.is_idle:
        worker.step()
        assert len(worker.engine.rows) <= 3

    assert len(worker.finished) == 10


def test_a_sequence_is_not_decoded_past_its_last_token(
    make_worker: Make, make_sequence: Make
) -> None:
    worker = make_worker()
    sequence = make_sequence(prompt(1), max_tokens=3)
    worker.add(sequence)
    worker.run()

    assert len(sequence.output_token_ids) == 3
    assert sequence.num_computed_tokens == 40 + 2


def test_a_sequence_without_tokens_left_is_refused(make_worker: Make, make_sequence: Make) -> None:
    worker = make_worker()
    sequence = make_sequence(prompt(1), max_tokens=2)
    sequence.output_token_ids = [1, 2]

    with pytest.raises(ValueError, match="has all its 2 tokens"):
        worker.add(sequence)


def test_a_resumed_sequence_goes_on_after_its_tokens(
    make_worker: Make, make_sequence: Make
) -> None:
    worker = make_worker()
    sequence = make_sequence(prompt(1), max_tokens=5)
    sequence.output_token_ids = [7, 8]
    sequence.num_resumed_tokens = 2
    worker.add(sequence)
    worker.run()

    assert sequence.output_token_ids[:2] == [7, 8]
    assert len(sequence.output_token_ids) == 5


def test_the_higher_class_goes_first(make_worker: Make, make_sequence: Make) -> None:
    worker = make_worker(settings=SchedulerSettings(max_batch=1))
    classes = ("low", "normal", "high", "low", "high")
    worker.add(*(make_sequence(prompt(index), 1, name) for index, name in enumerate(classes)))
    worker.run()

    order = [sequence.job.priority.value for sequence in worker.started]
    assert order == ["high", "high", "normal", "low", "low"]


def test_nobody_is_overtaken_for_longer_than_max_wait(
    make_worker: Make, make_sequence: Make
) -> None:
    worker = make_worker(step_s=0.1, settings=SchedulerSettings(max_batch=1, max_wait_s=2))
    low = make_sequence(prompt(0), 1, "low")
    worker.add(low)
    started_s = None
    for index in range(200):
        worker.add(make_sequence(prompt(index + 1), 1, "high"))
        worker.step()
        if started_s is None and low.status is not SequenceStatus.WAITING:
            started_s = worker.now

    # It had to wait for the one that was running when its time came.
    assert started_s is not None
    assert 2 <= started_s <= 2.5


def test_within_a_class_nobody_is_overtaken_by_more_than_the_lookahead(
    make_worker: Make, make_sequence: Make
) -> None:
    worker = make_worker(settings=SchedulerSettings(max_batch=2, lookahead=10))
    sequences = [make_sequence(prompt(997 * index % 100), 1) for index in range(100)]
    worker.add(*sequences)
    worker.run()

    place = {sequence: index for index, sequence in enumerate(worker.started)}
    assert max(abs(place[one] - index) for index, one in enumerate(sequences)) < 10
    assert worker.started != sequences


def test_a_long_prompt_does_not_hold_back_a_short_one(
    make_worker: Make, make_sequence: Make
) -> None:
    worker = make_worker(token_s=0.001, settings=SchedulerSettings(target_itl_ms=100))
    long = make_sequence(prompt(1, 5_000))
    worker.add(long)
    worker.step()
    short = make_sequence(prompt(2, 20))
    worker.add(short)
    while not short.output_token_ids:
        worker.step()

    assert long.num_computed_tokens < 1_000


def test_a_short_prompt_passes_several_long_ones(make_worker: Make, make_sequence: Make) -> None:
    worker = make_worker(token_s=0.001, settings=SchedulerSettings(target_itl_ms=100))
    worker.add(*(make_sequence(prompt(index * 10, 5_000)) for index in range(1, 4)))
    worker.step()
    short = make_sequence(prompt(2, 20))
    worker.add(short)
    worker.step()

    assert short.num_pending_tokens == 1


def test_a_stream_of_short_prompts_does_not_stop_a_long_one(
    make_worker: Make, make_sequence: Make
) -> None:
    worker = make_worker(token_s=0.001, settings=SchedulerSettings(target_itl_ms=100))
    long = make_sequence(prompt(1, 2_000))
    worker.add(long)
    for index in range(200):
        worker.add(*(make_sequence(prompt(2 + 3 * index + one, 40), 1) for one in range(3)))
        worker.step()

    assert long.output_token_ids


def test_running_sequences_get_their_token_within_the_target(
    make_worker: Make, make_sequence: Make
) -> None:
    worker = make_worker(step_s=0.02, token_s=0.001, settings=SchedulerSettings(target_itl_ms=200))
    running = make_sequence(prompt(1), max_tokens=500)
    worker.add(running)
    for _ in range(10):
        worker.step()
    worker.add(make_sequence(prompt(2, 10_000)))
    gaps = []
    for _ in range(60):
        before = worker.now
        worker.step()
        assert running in worker.plan.decode
        gaps.append(worker.now - before)

    assert max(gaps) <= 0.2
    # And the target is used: a timid chunk would prefill for ever.
    assert sorted(gaps)[30] >= 0.1


def test_short_prompts_share_a_prefill_step(make_worker: Make, make_sequence: Make) -> None:
    worker = make_worker()
    worker.add(*(make_sequence(prompt(index, 10)) for index in range(6)))
    worker.step()

    assert [scheduled.num_tokens for scheduled in worker.plan.prefill] == [10] * 6


def test_fixed_chunks_end_at_their_multiples(make_worker: Make, make_sequence: Make) -> None:
    worker = make_worker(settings=SchedulerSettings(prefill_chunk=16))
    sequence = make_sequence(prompt(1, 50))
    worker.add(sequence)
    ends = []
    for _ in range(4):
        worker.step()
        ends.append(sequence.num_computed_tokens)

    assert ends == [16, 32, 48, 50]


def test_a_state_is_taken_before_the_last_token(make_worker: Make, make_sequence: Make) -> None:
    worker = make_worker(kind=CacheKind.SNAPSHOTS)
    sequence = make_sequence(prompt(1, 50))
    worker.add(sequence)
    worker.step()

    assert sequence.num_computed_tokens == 49
    assert worker.plan.commits == [(sequence, 0, 49)]


def test_a_struck_sequence_runs_alone_until_its_first_new_token(
    make_worker: Make, make_sequence: Make
) -> None:
    worker = make_worker(settings=SchedulerSettings(prefill_chunk=50))
    others = [make_sequence(prompt(index), max_tokens=50) for index in range(3)]
    worker.add(*others)
    for _ in range(5):
        worker.step()
    struck = make_sequence(prompt(9, 300), max_tokens=5, runs_alone=True)
    worker.add(struck)
    while not struck.output_token_ids:
        worker.step()
        if struck in worker.engine.rows and not struck.output_token_ids:
            assert list(worker.engine.rows) == [struck]
    before = worker.engine.num_prompt_tokens
    worker.run()

    assert len(worker.finished) == 4
    # The others' keys and values stayed: of each, only what was in flight is computed again.
    assert worker.engine.num_prompt_tokens - before == 0
    worker.check_baseline()


def test_two_struck_sequences_run_one_after_the_other(
    make_worker: Make, make_sequence: Make
) -> None:
    worker = make_worker()
    struck = [make_sequence(prompt(index), runs_alone=True) for index in range(2)]
    worker.add(make_sequence(prompt(7), 30), *struck)
    worker.run()

    assert len(worker.finished) == 3


def budget_for_rows(num_rows: int, **fields: Any) -> SchedulerSettings:
    """Room for rows of 40 prompt tokens and 20 new ones."""
    footprint = Footprint(bytes_per_token=10)
    return SchedulerSettings(max_bytes=num_rows * 60 * 10, footprint=footprint, **fields)


def test_all_finish_over_a_small_budget_and_it_is_kept(
    make_worker: Make, make_sequence: Make
) -> None:
    settings = budget_for_rows(4)
    worker = make_worker(settings=settings)
    worker.add(*(make_sequence(prompt(index), 20) for index in range(32)))
    worker.run()

    assert len(worker.finished) == 32
    # Who is admitted has room to grow to its end here.
    assert worker.num_preempted == 0
    assert worker.peak_nbytes <= (settings.max_bytes or 0)
    worker.check_baseline()


def test_growth_beyond_the_budget_preempts_the_youngest_of_the_lowest_class(
    make_worker: Make, make_sequence: Make
) -> None:
    worker = make_worker(settings=budget_for_rows(4, growth_tokens=1))
    kept = [make_sequence(prompt(index), 40, "high") for index in range(2)]
    low = [make_sequence(prompt(2 + index), 40, "low") for index in range(2)]
    worker.add(*kept, *low)
    while not worker.num_preempted:
        worker.step()
    first_victim = worker.plan.detach[0]
    worker.run()

    assert first_victim is low[1]
    assert all(len(one.output_token_ids) == 40 for one in (*kept, *low))


def test_a_job_larger_than_the_whole_budget_still_runs(
    make_worker: Make, make_sequence: Make
) -> None:
    worker = make_worker(settings=budget_for_rows(1))
    worker.add(make_sequence(prompt(1, 500)), make_sequence(prompt(2)))
    worker.run()

    assert len(worker.finished) == 2


def test_reclaimable_cache_never_stands_in_the_way(make_worker: Make, make_sequence: Make) -> None:
    worker = make_worker(settings=budget_for_rows(2))
    for index in range(10):
        worker.add(make_sequence(prompt(index), 20))
        worker.run()

    assert worker.num_preempted == 0
    assert worker.cache.statistics.num_evicted_nodes > 0


def test_a_budget_for_activations_is_set_aside(make_worker: Make, make_sequence: Make) -> None:
    footprint = Footprint(bytes_per_token=10, bytes_per_prefill_token=5)
    settings = SchedulerSettings(max_bytes=2_000, footprint=footprint, max_prefill_tokens=128)
    worker = make_worker(settings=settings)
    worker.add(*(make_sequence(prompt(index), 20) for index in range(6)))
    worker.run()

    assert worker.peak_nbytes <= 2_000 - 5 * 128


def test_the_logits_of_read_prompts_are_set_aside_once(
    make_worker: Make, make_sequence: Make
) -> None:
    """Rows whose prompts are read share one forward's logits; others need none of that room."""
    footprint = Footprint(bytes_per_token=10, reading_nbytes=1_000)
    settings = SchedulerSettings(max_bytes=2_200, footprint=footprint)

    def num_running(num_read: int) -> int:
        worker = make_worker(settings=settings)
        for index in range(6):
            sequence = make_sequence(prompt(index), 20)
            if index < num_read:
                sequence.readout = Readout(0, sequence.job.prompt_token_ids[1:], num_top=0)
            worker.add(sequence)
        worker.step()
        return worker.scheduler.num_running

    # A row takes 600 bytes.
    assert [num_running(num_read) for num_read in (0, 1, 6)] == [3, 2, 2]


@pytest.mark.parametrize("steps_before", range(8))
@pytest.mark.parametrize("kind", CacheKind)
def test_cancelling_in_any_state_returns_to_the_baseline(
    steps_before: int, kind: CacheKind, make_worker: Make, make_sequence: Make
) -> None:
    worker = make_worker(kind=kind, settings=SchedulerSettings(prefill_chunk=20, max_batch=2))
    sequences: list[Sequence] = [make_sequence(prompt(index % 3, 45)) for index in range(6)]
    worker.add(*sequences)
    for _ in range(steps_before):
        worker.step()
    for sequence in sequences:
        worker.scheduler.finish(sequence)
        worker.scheduler.finish(sequence)
    worker.scheduler.drop(make_sequence(prompt(9)))
    worker.run()

    assert all(sequence.is_finished for sequence in sequences)
    worker.check_baseline()


def test_a_step_looks_at_no_more_sequences_however_many_wait(
    make_worker: Make, make_sequence: Make
) -> None:
    def lengths_read(num_waiting: int) -> int:
        worker = make_worker(settings=SchedulerSettings(max_batch=4))
        worker.add(*(make_sequence(prompt(index, 20), 8) for index in range(num_waiting)))
        for _ in range(3):
            worker.step()
        counted = CountingMonitor()
        with counted:
            worker.step()
        return counted.num_calls

    assert lengths_read(2_000) == lengths_read(100)


class CountingMonitor:
    """Counts the Python calls made while it is entered."""

    def __init__(self) -> None:
        self.num_calls = 0

    def __enter__(self) -> None:
        sys.setprofile(self._count)

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _count(self, _frame: object, event: str, _argument: object) -> None:
        self.num_calls += event == "call"
