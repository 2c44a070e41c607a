"""Executions that nobody works on are put right, whoever lost them."""

from headwater.schemas import (
    Expired,
    keys,
)
from headwater.worker.messages import Drop
from headwater.worker.streams import JobStreams
from redis import Redis

from .conftest import (
    FINISHED,
    LEASE_S,
    Stations,
    Submit,
    part,
    rq_counts,
    status_of,
    types_of,
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


def test_a_worker_takes_its_own_lost_job_again_only_when_its_engine_has_let_go_of_it(
    redis: Redis, station: Stations, submit: Submit
) -> None:
    job_id = submit()
    paused = station()
    paused.claim()
    paused.publisher.delta(job_id, [part(0, 1)])
    while paused.publisher.silent_claims():
        pass
    redis.delete(keys.worker_key(paused.worker_id))
    station().maintenance.run_once()
    assert status_of(redis, job_id) == "queued"

    # Awake again, and not yet told that the job is lost.
    assert not paused.claim_next()
    paused.heartbeat.beat()
    assert paused.inbox.get(timeout=10) == Drop(job_id)
    assert not paused.claim_next()
    paused.publisher.delta(job_id, [part(1, 2)])  # the old run goes on until it hears of it
    assert status_of(redis, job_id) == "queued"
    assert paused.publisher.num_open == 0

    paused.publisher.forget(job_id)
    assert paused.claim().attempt == 2
    paused.publisher.end(job_id, FINISHED)
    assert paused.publisher.wait_until_closed(10)
    assert types_of(redis, job_id) == ["started", "delta", "resumed", "finished"]
