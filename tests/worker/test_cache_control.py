"""What a loop tells of its caches, and how it empties them."""

from pathlib import Path
from typing import Any

import pytest
from headwater.schemas import CacheClear, CachedTokens
from headwater.worker.cold_prefixes import BLOCK_TOKENS
from headwater.worker.engine.loading import LoadedModel, load_model
from headwater.worker.engine.random_model import write_random_model

from tests.worker.test_cold_prefixes import Worker, job, tokens

SYSTEM = tokens(1, BLOCK_TOKENS)
ALL = CacheClear(clear_id="all")


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load_model(str(write_random_model(tmp_path_factory.mktemp("model"))))


@pytest.fixture
def start(tmp_path: Path, loaded: LoadedModel):
    """Start loops, with or without a directory, that are closed at the end."""
    started: list[Worker] = []

    def start_one(*, with_disk: bool = False, **settings: Any) -> Worker:
        started.append(Worker(loaded, tmp_path / "cache" if with_disk else None, **settings))
        # Reports come once a second; here at every look.
        started[-1].loop.cache_control._clock = lambda: float("inf")
        return started[-1]

    yield start_one
    for worker in started:
        worker.close()


def report(worker: Worker):
    worker.loop.cache_control.refresh()
    return worker.loop.cache_control.report


def serve(worker: Worker, count: int) -> None:
    for seed in range(count):
        worker.run(job(f"job-{seed}", SYSTEM + tokens(10 + seed, 9)))


def test_a_new_worker_holds_nothing(start: Any) -> None:
    told = report(start(kv_budget_bytes=10**8))

    assert (told.memory.nbytes, told.memory.num_nodes, told.top) == (0, 0, ())
    assert told.memory.budget_nbytes == 10**8
    assert told.disk is None
    assert told.hit_share == 0


def test_the_prefix_that_saved_most_comes_first_with_what_it_saved(start: Any) -> None:
    worker = start()
    serve(worker, 4)
    worker.run(job("other", tokens(99, 40)))
    worker.run(job("again", tokens(99, 40)))
    told = report(worker)

    assert [(each.num_tokens, each.num_hits, each.saved_tokens) for each in told.top] == [
        (len(SYSTEM), 3, 3 * len(SYSTEM)),
        (39, 1, 39),
    ]
    assert told.cached == CachedTokens(memory=3 * len(SYSTEM) + 39)
    assert told.hit_share == pytest.approx((3 * len(SYSTEM) + 39) / (4 * (len(SYSTEM) + 9) + 80))
    assert told.memory.nbytes == worker.loop.kv_nbytes
    assert told.memory.num_hits == 4


def test_a_report_tells_no_token_and_names_prefixes_as_the_disk_does(start: Any) -> None:
    worker = start(with_disk=True)
    worker.run(job("first", SYSTEM), job("second", SYSTEM))
    worker.run(job("third", SYSTEM))
    worker.loop.cold.tier.flush()
    told = report(worker)
    root = f"{worker.loop._scheduler.root_key(_sequence(worker))[0]} default"
    (entry,) = worker.loop.cold.tier.find(root, SYSTEM, len(SYSTEM) - 1)

    assert told.top[0].hash == entry.key
    assert told.disk.num_entries == worker.loop.cold.tier.num_entries > 0
    assert told.disk.nbytes > 0
    assert str(SYSTEM[5:8])[1:-1].replace(" ", "") not in told.encode().decode()


def _sequence(worker: Worker):
    from headwater.worker.sequence import Sequence

    return Sequence(job("probe", SYSTEM))


def test_namespaces_are_told_apart(start: Any) -> None:
    worker = start()
    for namespace in ("tenant-a", "tenant-b"):
        for number in range(2):
            worker.run(job(f"{namespace}-{number}", SYSTEM, namespace=namespace))
    first, second = report(worker).top

    assert {first.namespace, second.namespace} == {"tenant-a", "tenant-b"}
    assert first.hash != second.hash


def test_only_so_many_prefixes_are_told(start: Any) -> None:
    worker = start()
    for number in range(25):
        for name in ("first", "again"):
            worker.run(job(f"{name}-{number}", tokens(number, 20), max_tokens=1))
    told = report(worker)

    assert len(told.top) == 20
    assert told.memory.num_hits == 25


def test_clearing_frees_memory_and_disk_and_what_follows_is_computed(start: Any) -> None:
    worker = start(with_disk=True)
    serve(worker, 2)
    worker.loop.cold.tier.flush()
    before = report(worker)
    worker.loop.cache_control.clear(ALL)
    worker.loop.cold.tier.flush()
    after = report(worker)
    again = job("again", SYSTEM + tokens(10, 9))
    worker.run(again)

    assert after.last_clear.clear_id == "all"
    assert after.last_clear.memory_freed_nbytes == before.memory.nbytes > 0
    assert after.last_clear.disk_removed_entries == before.disk.num_entries > 0
    assert (after.memory.nbytes, after.disk.nbytes, after.disk.num_entries) == (0, 0, 0)
    assert worker.cached(again) == CachedTokens()


@pytest.mark.parametrize(("memory", "disk"), [(True, False), (False, True)])
def test_memory_and_disk_can_be_cleared_alone(start: Any, memory: bool, disk: bool) -> None:
    worker = start(with_disk=True)
    serve(worker, 1)
    worker.loop.cold.tier.flush()
    worker.loop.cache_control.clear(CacheClear(clear_id="one", memory=memory, disk=disk))
    worker.loop.cold.tier.flush()
    told = report(worker)

    assert (told.memory.nbytes == 0, told.disk.num_entries == 0) == (memory, disk)


def test_what_a_running_job_uses_stays_and_its_text_is_right(start: Any) -> None:
    worker, undisturbed = start(), start()
    for each in (worker, undisturbed):
        serve(each, 1)
    running = job("running", SYSTEM + tokens(50, 9), max_tokens=12)
    worker.admit(running)
    for _ in range(4):
        worker.loop.step()
    worker.loop.cache_control.clear(ALL)
    held = report(worker).memory
    worker.finish()
    undisturbed.run(running)

    assert held.nbytes == held.pinned_nbytes > 0
    assert worker.sink.tokens("running") == undisturbed.sink.tokens("running")
    worker.loop.cache_control.clear(ALL)
    assert report(worker).memory.nbytes == 0


def test_reports_take_a_small_share_of_the_time_however_long_one_takes(start: Any) -> None:
    worker = start()
    control, now, made = worker.loop.cache_control, [100.0], []
    make = control._make

    def slow_make():
        made.append(now[0])
        now[0] += 0.2
        return make()

    control._make, control._clock = slow_make, lambda: now[0]
    control._due_s = now[0]
    while now[0] < 200:
        control.refresh()
        now[0] += 0.5

    assert 8 <= len(made) <= 11
