"""The lists that onlookers read: who is alive, and which queues have or had work."""

from typing import Any

import pytest
from headwater.producer.status import read_status, read_workers
from headwater.schemas import keys
from headwater.worker.intake.active_queues import ActiveQueues
from redis import Redis

from .conftest import FINISHED, QUEUE, Station, Stations, Submit

QUEUES = b"rq:queues"


def listed_workers(redis: Redis) -> list[str]:
    return [name.decode() for name in redis.zrange(keys.workers_key(), 0, -1)]


def names_of_queues(redis: Redis) -> tuple[set[bytes], set[bytes]]:
    """Return our own set and RQ's."""
    return redis.smembers(keys.active_queues_key("m")), redis.smembers(QUEUES)


BOTH = ({QUEUE.encode()}, {f"rq:queue:{QUEUE}".encode()})
NONE: tuple[set[bytes], set[bytes]] = (set(), set())


def finish_one(worker: Station, submit: Submit) -> str:
    """Run a job to its end."""
    job_id = submit()
    worker.claim()
    worker.publisher.end(job_id, FINISHED)
    assert worker.publisher.wait_until_closed(10)
    return job_id


def test_each_heartbeat_lists_its_worker_and_takes_out_the_dead(
    redis: Redis, station: Stations
) -> None:
    """The list itself expires, for the day when nobody is left."""
    first, second = station(), station()
    now_ms = redis.time()[0] * 1000
    redis.zadd(keys.workers_key(), {"dead": now_ms - 1})

    first.heartbeat.beat()

    assert sorted(listed_workers(redis)) == sorted([first.worker_id, second.worker_id])
    assert 0 < redis.ttl(keys.workers_key()) <= 24 * 3600


def test_a_worker_that_leaves_is_listed_no_more(redis: Redis, station: Stations) -> None:
    """At once, and the others stay."""
    leaving, staying = station(), station()
    leaving.heartbeat.start()
    leaving.heartbeat.stop()

    assert listed_workers(redis) == [staying.worker_id]
    assert [worker.status.worker_id for worker in read_workers(redis)] == [staying.worker_id]


def test_a_list_that_was_lost_is_made_anew(redis: Redis, station: Stations) -> None:
    """A fail-over may take it away."""
    worker = station()
    redis.delete(keys.workers_key())

    worker.heartbeat.beat()

    assert listed_workers(redis) == [worker.worker_id]


def test_a_queue_without_work_leaves_both_sets_and_stays_in_sight(
    redis: Redis, station: Stations, submit: Submit
) -> None:
    """Nothing of it lasts; what ended there is shown as long as RQ has it."""
    worker = station()
    finish_one(worker, submit)
    assert names_of_queues(redis) == BOTH

    worker.maintenance.run_once()

    assert names_of_queues(redis) == NONE
    (shown,) = read_status(redis).queues
    assert (shown.name, shown.depth, shown.finished) == (QUEUE, 0, 1)
    assert 0 < redis.ttl(keys.idle_queues_key()) <= worker.settings.retention_s


def test_a_submit_brings_both_names_back(redis: Redis, station: Stations, submit: Submit) -> None:
    """In the transaction that adds the job."""
    worker = station()
    finish_one(worker, submit)
    worker.maintenance.run_once()

    again = submit()

    assert names_of_queues(redis) == BOTH
    assert worker.claim().job_id == again


def test_a_submit_in_the_middle_of_a_retirement_keeps_both_names(
    redis: Redis, station: Stations, submit: Submit, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The queue was seen empty, and has work before its names are gone."""
    worker = station()
    finish_one(worker, submit)
    remember = ActiveQueues._remember
    added: list[str] = []

    def submit_first(self: ActiveQueues, *arguments: Any) -> None:
        added.append(submit())
        remember(self, *arguments)

    monkeypatch.setattr(ActiveQueues, "_remember", submit_first)
    worker.maintenance.run_once()

    assert names_of_queues(redis) == BOTH
    assert [worker.claim().job_id] == added


def test_a_job_that_goes_back_to_a_retired_queue_brings_both_names_back(
    redis: Redis, station: Stations, submit: Submit, monkeypatch: pytest.MonkeyPatch
) -> None:
    """RQ gave it up; one worker finds that while another sees the queue empty."""
    job_id = submit()
    worker, other = station(), station()
    worker.claim()
    redis.hset(f"rq:job:{job_id}", "status", "failed")
    redis.delete(f"rq:wip:{QUEUE}")
    redis.zadd(f"rq:failed:{QUEUE}", {job_id: 2e9})
    requeue = other.book.requeue

    def retire_first(*arguments: Any) -> None:
        worker.maintenance.retire_queues()
        assert names_of_queues(redis) == NONE
        requeue(*arguments)

    monkeypatch.setattr(other.book, "requeue", retire_first)
    other.maintenance.run_once()

    assert names_of_queues(redis) == BOTH
    assert other.claim().job_id == job_id
