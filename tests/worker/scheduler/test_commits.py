"""When keys and values go into the prefix cache: where somebody wants them, else at the end."""

from collections.abc import Callable
from typing import Any

import pytest
from headwater.worker.scheduler import Footprint, SchedulerSettings
from headwater.worker.segment import CacheKind

from tests.worker.scheduler.conftest import BYTES_PER_TOKEN

Make = Callable[..., Any]

HEAD = list(range(100, 140))


def run_steps(worker: Any, num_steps: int) -> None:
    for _ in range(num_steps):
        worker.step()


def test_a_prompt_that_nobody_shares_stays_its_rows_own(
    make_worker: Make, make_sequence: Make
) -> None:
    worker = make_worker()
    worker.add(make_sequence(HEAD, max_tokens=20))
    run_steps(worker, 10)
    assert worker.cache.nbytes == 0

    worker.run()
    # Prompt and answer, but for the last token: it was never computed.
    assert worker.cache.nbytes == BYTES_PER_TOKEN * (40 + 19)


@pytest.mark.parametrize("kind", CacheKind)
def test_where_prompts_are_to_be_kept_they_are_kept_at_once(
    kind: CacheKind, make_worker: Make, make_sequence: Make
) -> None:
    worker = make_worker(kind=kind, settings=SchedulerSettings(keeps_prompts=True))
    worker.add(make_sequence(HEAD, max_tokens=20))
    run_steps(worker, 3)

    assert worker.cache.nbytes == BYTES_PER_TOKEN * 39


def test_who_comes_while_the_first_decodes_computes_the_rest_only(
    make_worker: Make, make_sequence: Make
) -> None:
    worker = make_worker()
    worker.add(make_sequence([*HEAD, 1, 2], max_tokens=20))
    run_steps(worker, 5)
    late = make_sequence([*HEAD, 3, 4, 5])
    worker.add(late)
    run_steps(worker, 2)
    assert late in worker.started

    worker.run()
    assert worker.engine.num_prompt_tokens == 42 + 3
    worker.check_baseline()


def test_who_follows_an_ended_row_finds_all_of_it_in_the_same_step(
    make_worker: Make, make_sequence: Make
) -> None:
    worker = make_worker()
    first = make_sequence(HEAD, max_tokens=4)
    worker.add(first)
    while not worker.finished:
        worker.step()
    worker.add(make_sequence([*HEAD, *first.output_token_ids, 7, 8]))
    worker.step()

    assert worker.plan.detach == [first]
    assert [row.sequence.num_cached_tokens for row in worker.plan.admit] == [40 + 3]


def test_a_commit_without_room_keeps_nobody_parked(make_worker: Make, make_sequence: Make) -> None:
    footprint = Footprint(bytes_per_token=BYTES_PER_TOKEN)
    # Room for the row, but not for a copy of what it shares.
    budget = BYTES_PER_TOKEN * (42 + 64 + 20)
    worker = make_worker(settings=SchedulerSettings(footprint=footprint, max_bytes=budget))
    worker.add(make_sequence([*HEAD, 1, 2], max_tokens=64))
    run_steps(worker, 3)
    worker.add(make_sequence([*HEAD, 3, 4], max_tokens=64))
    run_steps(worker, 1)
    assert worker.scheduler.num_parked == 1

    run_steps(worker, 1)
    assert worker.scheduler.num_parked == 0
    worker.run()
    assert len(worker.finished) == 2
