"""Executions that nobody works on are put right, whoever lost them."""

from headwater.schemas import (
    Expired,
    keys,
)
from headwater.worker.streams import JobStreams
from redis import Redis

from .conftest import (
    LEASE_S,
    Stations,
    Submit,
    rq_counts,
    status_of,
)


def test_an_end_that_another_wrote_is_recorded_while_the_worker_lives(
    redis: Redis, station: Stations, submit: Submit
) -> None:
    job_id = submit()
    worker = station()
    worker.claim()
    JobStreams(redis).close(job_id, Expired(), 60_000)

    station().maintenance.run_once()

    assert status_of(redis, job_id) == "failed"
    assert rq_counts(redis)["started"] == 0


def test_a_job_that_its_worker_dropped_is_queued_again_after_a_lease(
    redis: Redis, station: Stations, submit: Submit
) -> None:
    job_id = submit()
    worker = station()
    worker.claim()
    now = [0.0]
    worker.maintenance._clock = lambda: now[0]
    worker.publisher.forget(job_id)

    worker.maintenance.run_once()
    assert status_of(redis, job_id) == "started"
    now[0] = LEASE_S
    worker.maintenance.run_once()

    assert status_of(redis, job_id) == "queued"
    assert worker.claim().attempt == 2


def test_a_running_job_is_never_queued_again_by_its_own_worker(
    redis: Redis, station: Stations, submit: Submit
) -> None:
    job_id = submit()
    worker = station()
    worker.claim()
    now = [0.0]
    worker.maintenance._clock = lambda: now[0]

    for _ in range(3):
        worker.maintenance.run_once()
        now[0] += LEASE_S

    assert status_of(redis, job_id) == "started"


def test_one_broken_stream_keeps_no_other_job_from_being_recovered(
    redis: Redis, station: Stations, submit: Submit
) -> None:
    bad, good = submit(), submit()
    dead, heir = station(), station()
    dead.claim()
    dead.claim()
    redis.delete(keys.worker_key(dead.worker_id), keys.stream_key(bad))
    redis.set(keys.stream_key(bad), "none of ours")

    heir.maintenance.run_once()

    assert heir.claim().job_id == good
