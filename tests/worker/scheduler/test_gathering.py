"""Prompts that come together begin to decode together; who would wait long does not wait."""

from collections.abc import Callable
from typing import Any

from headwater.worker.scheduler import SchedulerSettings
from headwater.worker.sequence import Sequence

Make = Callable[..., Any]


def prompt(first: int, length: int) -> list[int]:
    """A prompt that shares nothing with one of another *first*."""
    return [first * 10_000 + index for index in range(length)]


def first_tokens(worker: Any, sequences: list[Sequence]) -> list[float]:
    """Run; return when each was given its first token, on the worker's clock."""
    times: dict[Sequence, float] = {}
    while len(times) < len(sequences):
        worker.step()
        for sequence in sequences:
            if sequence.num_output_tokens and sequence not in times:
                times[sequence] = worker.now
    return [times[sequence] for sequence in sequences]


def slow_worker(make_worker: Make, **settings: Any) -> Any:
    """Return a worker whose steps cost much, as a CPU's do."""
    return make_worker(step_s=0.1, token_s=0.004, settings=SchedulerSettings(**settings))


def test_prompts_that_come_together_get_their_first_tokens_together(
    make_worker: Make, make_sequence: Make
) -> None:
    """All decode in the same steps, so that there are no more than one of them needs."""
    worker = slow_worker(make_worker)
    sequences = [make_sequence(prompt(index, 100), max_tokens=8) for index in range(6)]
    worker.add(*sequences)

    times = first_tokens(worker, sequences)

    assert len(set(times)) == 1
    num_decode_steps = 0
    while not worker.scheduler.is_idle:
        worker.step()
        num_decode_steps += bool(worker.plan.decode)
    assert num_decode_steps == 7


def test_takers_of_a_prefix_are_waited_for(make_worker: Make, make_sequence: Make) -> None:
    """They are parked while their leader computes it, and it is ready before they are."""
    worker = slow_worker(make_worker)
    shared = prompt(1, 80)
    sequences = [make_sequence([*shared, 90_000 + index, 7, 8], max_tokens=4) for index in range(5)]
    worker.add(*sequences)

    assert len(set(first_tokens(worker, sequences))) == 1


def test_nobody_waits_for_a_long_prompt(make_worker: Make, make_sequence: Make) -> None:
    """A short one beside it begins at once, whoever came first."""
    worker = slow_worker(make_worker)
    long, short = make_sequence(prompt(1, 4000), 4), make_sequence(prompt(2, 20), 4)
    worker.add(long, short)

    of_long, of_short = first_tokens(worker, [long, short])

    assert of_short < 2 < of_long


def test_nobody_waits_longer_than_so_many_steps(make_worker: Make, make_sequence: Make) -> None:
    """However many prompts there are."""
    worker = slow_worker(make_worker)
    sequences = [make_sequence(prompt(index, 100), max_tokens=4) for index in range(30)]
    worker.add(*sequences)

    times = first_tokens(worker, sequences)

    # 64 steps of 0.18 s, half of what the target allows as long as none was seen, and one more.
    assert 11 < min(times) < 13
    assert max(times) > min(times)


def test_who_is_urgent_waits_for_nobody(make_worker: Make, make_sequence: Make) -> None:
    """Nor do those who are ready beside it."""
    worker = slow_worker(make_worker)
    urgent = make_sequence(prompt(0, 20), 4, "high")
    others = [make_sequence(prompt(index, 200), max_tokens=4) for index in range(1, 6)]
    worker.add(urgent, *others)

    of_urgent, *times = first_tokens(worker, [urgent, *others])

    assert of_urgent < min(times)


def test_beside_running_sequences_nobody_waits(make_worker: Make, make_sequence: Make) -> None:
    """Those have to go on, so there is nothing to gather for."""
    worker = slow_worker(make_worker)
    running = make_sequence(prompt(0, 20), max_tokens=100)
    worker.add(running)
    first_tokens(worker, [running])
    others = [make_sequence(prompt(index, 200), max_tokens=4) for index in range(1, 6)]
    worker.add(*others)

    assert len(set(first_tokens(worker, others))) > 1


def test_one_who_leaves_is_waited_for_no_more(make_worker: Make, make_sequence: Make) -> None:
    """A cancelled prompt releases those who were ready."""
    worker = slow_worker(make_worker, max_prefill_tokens=32)
    ready, other = make_sequence(prompt(1, 10), 4), make_sequence(prompt(2, 200), 4)
    worker.add(ready, other)
    for _ in range(4):
        worker.step()
    assert ready.num_pending_tokens == 1
    assert ready.num_output_tokens == 0

    worker.scheduler.finish(other)

    worker.step()
    assert ready.num_output_tokens == 1


def test_the_next_who_come_together_wait_again(make_worker: Make, make_sequence: Make) -> None:
    """That time was over once says nothing of those who come when all is done."""
    worker = slow_worker(make_worker)
    many = [make_sequence(prompt(index, 100), max_tokens=4) for index in range(30)]
    worker.add(*many)
    assert len(set(first_tokens(worker, many))) > 1
    worker.run()
    later = [make_sequence(prompt(index, 50), max_tokens=4) for index in range(40, 46)]
    worker.add(*later)

    assert len(set(first_tokens(worker, later))) == 1
