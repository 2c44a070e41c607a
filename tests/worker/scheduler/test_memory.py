"""What the engine holds above what its rows use counts, too."""

from collections.abc import Callable
from typing import Any

import pytest
from headwater.worker.allocation import EXACT, Allocation
from headwater.worker.scheduler import Footprint, SchedulerSettings

from .conftest import BYTES_PER_TOKEN

Make = Callable[..., Any]

PAGED = Allocation(page_tokens=8, tail_tokens=16, spare_tokens=32, spare_share=0.25)


def prompt(index: int) -> list[int]:
    return [1000 * index + position for position in range(40)]


def settings_for(num_tokens: int, allocation: Allocation) -> SchedulerSettings:
    footprint = Footprint(
        bytes_per_token=BYTES_PER_TOKEN, shares_prefix=True, allocation=allocation
    )
    return SchedulerSettings(max_bytes=num_tokens * BYTES_PER_TOKEN, footprint=footprint)


@pytest.mark.parametrize(("tokens", "held"), [(0, 16), (7, 16), (8, 24), (40, 56), (47, 56)])
def test_a_row_holds_whole_pages_and_a_tail(tokens: int, held: int) -> None:
    assert PAGED.held_tokens(tokens) == held
    assert EXACT.held_tokens(tokens) == tokens


@pytest.mark.parametrize("num_rows", [2, 4, 9])
def test_rows_their_free_memory_and_the_cache_keep_to_the_budget(
    num_rows: int, make_worker: Make, make_sequence: Make
) -> None:
    """Rows that end leave free pages behind in the step in which the cache takes their tokens."""
    settings = settings_for(num_rows * PAGED.held_tokens(60) + PAGED.spare_tokens, PAGED)
    worker = make_worker(settings=settings)
    worker.add(*(make_sequence(prompt(index), 5 + index % 16) for index in range(40)))
    worker.run()

    assert len(worker.finished) == 40
    assert worker.num_preempted == 0
    assert worker.cache.statistics.num_evicted_nodes > 0
    assert worker.peak_nbytes <= settings.max_bytes


def test_what_the_engine_holds_besides_leaves_the_cache_less(
    make_worker: Make, make_sequence: Make
) -> None:
    worker = make_worker(settings=settings_for(400, EXACT))
    for index in range(20):
        worker.add(make_sequence(prompt(index), 20))
        worker.run()
    full = worker.cache.nbytes
    worker.engine.num_extra_tokens = 200
    worker.add(make_sequence(prompt(90), 20))
    worker.run()

    assert full > 300 * BYTES_PER_TOKEN
    assert worker.cache.nbytes <= 200 * BYTES_PER_TOKEN
    assert worker.peak_nbytes <= 400 * BYTES_PER_TOKEN + 200 * BYTES_PER_TOKEN


def test_nobody_is_admitted_into_what_the_engine_holds(
    make_worker: Make, make_sequence: Make
) -> None:
    worker = make_worker(settings=settings_for(400, EXACT))
    worker.engine.num_extra_tokens = 250
    worker.add(*(make_sequence(prompt(index), 20) for index in range(6)))
    worker.step()
    worker.step()

    # Of 60 tokens each.
    assert worker.scheduler.num_running == 2
    worker.run()
    assert len(worker.finished) == 6


def test_rows_go_one_by_one_while_the_engine_holds_too_much(
    make_worker: Make, make_sequence: Make
) -> None:
    """How much a row's going frees is known when it has gone."""
    worker = make_worker(settings=settings_for(400, EXACT))
    sequences = [make_sequence(prompt(index), 20) for index in range(6)]
    worker.add(*sequences)
    for _ in range(3):
        worker.step()
    assert worker.scheduler.num_running == 6
    # Their 6 x 60 tokens and this are 4% above the budget.
    worker.engine.num_extra_tokens = 56
    worker.step()
    assert worker.plan.num_preempted == 0
    worker.engine.num_extra_tokens = 200
    worker.step()
    assert worker.plan.detach == [sequences[-1]]
    worker.step()
    assert worker.plan.detach == [sequences[-2]]
    worker.engine.num_extra_tokens = 0
    worker.step()
    # Whoever came back would be too much again.
    assert worker.scheduler.num_running == 4
    worker.run()

    assert worker.num_preempted == 2
    assert all(len(each.output_token_ids) == 20 for each in sequences)
