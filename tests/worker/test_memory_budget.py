"""Rows and prefix cache keep to their budget together, over models of every kind."""

import random
from dataclasses import dataclass

import pytest
from headwater.worker.engine import memory
from headwater.worker.engine.loading import LoadedModel
from headwater.worker.scheduler import SchedulerSettings
from headwater.worker.segment import CacheKind

from tests.worker.test_cold_prefixes import (  # noqa: F401 - fixtures
    Worker,
    job,
    loaded,
    loaded_models,
    tokens,
)

LONGEST = 200


@dataclass
class Excess:
    """By how much what is planned and held was above the budget, and how large an entry is.

    Nothing is planned for longer than a step, so this is looked at when one has been planned.
    """

    worst: int = 0
    largest_entry: int = 0
    peak: int = 0


def watch(worker: Worker, excess: Excess) -> None:
    """Measure wherever the cache has grown."""
    scheduler = worker.loop._scheduler
    memory, cache = scheduler._rows.memory, scheduler.cache
    insert = cache.insert

    def measured(root_key, token_ids, start, segment):
        node = insert(root_key, token_ids, start, segment)
        excess.largest_entry = max(excess.largest_entry, segment.nbytes)
        held = memory._rows_nbytes + memory._activation_nbytes + cache.nbytes
        excess.peak = max(excess.peak, held)
        excess.worst = max(excess.worst, held - scheduler.max_bytes)
        return node

    cache.insert = measured


def random_jobs(rng: random.Random, count: int) -> list:
    """Prompts of any length that share starts of any length."""
    prompts = [
        tokens(rng.randrange(4), LONGEST)[: rng.randrange(20, LONGEST)] for _ in range(count)
    ]
    return [
        job(f"job-{index}", prompt + tokens(100 + index, 9), max_tokens=rng.randrange(1, 9))
        for index, prompt in enumerate(prompts)
    ]


def check_budget(loaded: LoadedModel, seed: int, num_jobs: int) -> int:  # noqa: F811 - the fixture's value
    """Run jobs over a budget for a few of them; return how many nodes had to go."""
    rng = random.Random(seed)
    unlimited = Worker(loaded, None, kv_budget_bytes=10**10)
    footprint = unlimited.loop._scheduler._settings.footprint
    # A step of as many prompt tokens as there may be, and some rows.
    forward = SchedulerSettings().max_prefill_tokens * footprint.bytes_per_prefill_token
    budget = forward + rng.choice([2, 3, 6]) * footprint.row_nbytes(LONGEST + 20, 0)
    worker = Worker(
        loaded,
        None,
        runner=unlimited.loop._engine._runner,
        kv_budget_bytes=budget,
        max_batch=rng.choice([1, 4]),
        prefill_chunk=rng.choice([None, 32]),
        snapshot_stride=rng.choice([16, 32, 64]),
    )
    excess = Excess()
    watch(worker, excess)
    for each in random_jobs(rng, num_jobs):
        worker.admit(each)
        while rng.random() < 0.7:
            worker.loop.step()
    worker.finish()
    worker.loop._scheduler.cache.check_integrity()

    assert len(worker.sink.ends) == num_jobs
    assert {end.type for end in worker.sink.ends.values()} == {"finished"}
    assert excess.worst <= excess.largest_entry
    return worker.loop._scheduler.cache.statistics.num_evicted_nodes


def test_the_budget_is_never_exceeded_by_more_than_an_entry(
    loaded: LoadedModel,  # noqa: F811 - the fixture's value
) -> None:
    assert check_budget(loaded, 1, 8) > 0


@pytest.mark.parametrize("num_shared", [0, 60])
@pytest.mark.parametrize("num_rows", [3, 6])
def test_rows_pads_and_cache_really_hold_no_more_than_the_budget(
    loaded: LoadedModel,  # noqa: F811 - the fixture's value
    num_rows: int,
    num_shared: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What the runner holds is asked after each step: free pages and ends of tails, too."""
    monkeypatch.setattr(memory, "_activation_nbytes", lambda config: 0)
    unlimited = Worker(loaded, None, kv_budget_bytes=10**10)
    footprint = unlimited.loop._scheduler._settings.footprint
    budget = num_rows * footprint.row_nbytes(LONGEST + 20, 0)
    runner = unlimited.loop._engine._runner
    worker = Worker(loaded, None, runner=runner, kv_budget_bytes=budget, max_batch=16)
    excess = Excess()
    watch(worker, excess)
    rng = random.Random(5)
    for index in range(16):
        own = tokens(100 + index, rng.randrange(20, LONGEST - num_shared))
        worker.admit(job(f"job-{index}", tokens(1, num_shared) + own, max_tokens=20))
    peak = 0
    while not worker.loop.is_idle:
        worker.loop.step()
        peak = max(peak, worker.loop.kv_nbytes)

    assert {end.type for end in worker.sink.ends.values()} == {"finished"}
    assert len(worker.sink.ends) == 16
    assert worker.loop._scheduler.cache.statistics.num_evicted_nodes > 0
    is_cuttable = runner.cache_kind is CacheKind.SEGMENTS
    assert peak <= (1.1 * budget if is_cuttable else budget + excess.largest_entry)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(100, 125))
def test_no_random_workload_exceeds_the_budget(
    loaded: LoadedModel,  # noqa: F811 - the fixture's value
    seed: int,
) -> None:
    check_budget(loaded, seed, 24)
