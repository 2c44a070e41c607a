"""The Redis side of a worker from the claim to the end, on a real server."""

import pytest
from headwater.producer.client import Producer
from headwater.producer.status import read_status
from headwater.schemas import (
    Cancelled,
    Expired,
    Failed,
    Finished,
    Released,
    Resumed,
    Started,
    WorkerStatus,
    keys,
)
from headwater.worker.messages import Cancel, Drop
from headwater.worker.streams import JobStreams
from redis import Redis
from rq.job import JobStatus

from .conftest import (
    FINISHED,
    QUEUE,
    Station,
    Stations,
    Submit,
    in_threads,
    part,
    rq_counts,
    status_of,
    text_of,
    types_of,
    wait_for_entries,
)


def test_a_job_goes_from_its_queue_to_its_end(
    redis: Redis, station: Stations, submit: Submit
) -> None:
    job_id = submit()
    worker = station()

    assert rq_counts(redis) == {
        "queued": 1,
        "started": 0,
        "finished": 0,
        "failed": 0,
        "canceled": 0,
    }
    claim = worker.claim()
    assert rq_counts(redis) == {
        "queued": 0,
        "started": 1,
        "finished": 0,
        "failed": 0,
        "canceled": 0,
    }
    worker.publisher.delta(job_id, [part(0, 1, 2)])
    worker.publisher.delta(job_id, [part(2, 3)])
    worker.publisher.end(job_id, FINISHED)
    assert worker.publisher.wait_until_closed(10)

    assert claim.job_id == job_id
    assert text_of(redis, job_id) == "bcd"
    assert types_of(redis, job_id)[0] == "started"
    assert rq_counts(redis) == {
        "queued": 0,
        "started": 0,
        "finished": 1,
        "failed": 0,
        "canceled": 0,
    }
    assert status_of(redis, job_id) == "finished"


@pytest.mark.parametrize(
    ("end", "status", "registry"),
    [
        (FINISHED, "finished", "finished"),
        (Failed(code="x", message="y"), "failed", "failed"),
        (Cancelled(), "canceled", "canceled"),
        (Expired(), "failed", "failed"),
    ],
    ids=lambda value: getattr(value, "type", None),
)
def test_every_kind_of_end_leaves_no_key_without_expiry(
    redis: Redis, station: Stations, submit: Submit, end: Finished, status: str, registry: str
) -> None:
    job_id = submit()
    worker = station()
    worker.claim()
    worker.publisher.delta(job_id, [part(0, 1)])
    worker.publisher.end(job_id, end)
    assert worker.publisher.wait_until_closed(10)

    assert status_of(redis, job_id) == status
    assert rq_counts(redis)[registry] == 1
    worker.maintenance.run_once()
    shared = {b"rq:workers", b"rq:queues", f"rq:workers:{QUEUE}".encode()}
    lasting = {key for key in redis.keys("*") if redis.ttl(key) == -1}
    assert lasting <= shared


def test_a_finished_stream_is_never_generated_again(
    redis: Redis, station: Stations, submit: Submit
) -> None:
    job_id = submit()
    worker = station()
    JobStreams(redis).close(job_id, FINISHED, 60_000)

    assert worker.claim_next()

    assert worker.inbox.empty()
    assert status_of(redis, job_id) == "finished"
    assert types_of(redis, job_id) == ["finished"]


def test_a_dead_workers_job_is_resumed_by_another(
    redis: Redis, station: Stations, submit: Submit
) -> None:
    job_id = submit()
    dead, heir = station(), station()
    dead.claim()
    dead.publisher.delta(job_id, [part(0, 1, 2)])
    wait_for_entries(redis, job_id, 2)
    redis.delete(keys.worker_key(dead.worker_id))  # its lease lapses

    heir.maintenance.run_once()
    claim = heir.claim()

    assert claim.attempt == 2
    assert [p.token_ids for p in claim.history] == [(1, 2)]
    assert claim.strikes == 0
    heir.publisher.delta(job_id, [part(2, 3)])
    heir.publisher.end(job_id, FINISHED)
    assert heir.publisher.wait_until_closed(10)
    assert text_of(redis, job_id) == "bcd"


def test_a_zombies_entries_are_fenced_and_it_drops_the_job(
    redis: Redis, station: Stations, submit: Submit
) -> None:
    job_id = submit()
    zombie, heir = station(), station()
    zombie.claim()
    redis.delete(keys.worker_key(zombie.worker_id))
    heir.maintenance.run_once()
    heir.claim()

    zombie.publisher.delta(job_id, [part(0, 9)])
    assert zombie.publisher.wait_until_closed(10)

    assert zombie.inbox.get(timeout=10) == Drop(job_id)
    assert types_of(redis, job_id) == ["started", "resumed"]


def test_a_zombies_end_is_fenced_too(redis: Redis, station: Stations, submit: Submit) -> None:
    job_id = submit()
    zombie, heir = station(), station()
    zombie.claim()
    redis.delete(keys.worker_key(zombie.worker_id))
    heir.maintenance.run_once()

    # Queued again and begun by nobody: the stream alone would still let it through.
    zombie.publisher.end(job_id, FINISHED)
    assert zombie.publisher.wait_until_closed(10)

    assert types_of(redis, job_id) == ["started"]
    assert status_of(redis, job_id) == "queued"
    assert heir.claim().attempt == 2


def test_a_living_workers_job_is_left_alone(station: Stations, submit: Submit) -> None:
    submit()
    worker, other = station(), station()
    worker.claim()

    other.maintenance.run_once()

    assert not other.claim_next()


def test_a_hand_back_goes_to_the_front_and_is_resumed(
    redis: Redis, station: Stations, submit: Submit
) -> None:
    first = submit()
    worker = station()
    worker.claim()
    submit()
    worker.publisher.delta(first, [part(0, 1)])
    worker.publisher.release(first, "drain")
    assert worker.publisher.wait_until_closed(10)

    assert types_of(redis, first) == ["started", "delta", "released"]
    assert rq_counts(redis)["queued"] == 2
    claim = station().claim()
    assert (claim.job_id, claim.attempt, claim.strikes) == (first, 2, 0)


def test_three_strikes_are_a_dead_letter(redis: Redis, station: Stations, submit: Submit) -> None:
    job_id = submit()
    heir = station()
    for strikes in range(3):
        victim = station()
        assert victim.claim().strikes == strikes
        redis.delete(keys.worker_key(victim.worker_id))
        heir.maintenance.run_once()

    assert heir.claim_next()

    assert heir.inbox.empty()
    end = JobStreams(redis).read(job_id)[-1].event
    assert isinstance(end, Failed)
    assert end.code == "poisoned"
    assert heir.ends == [end]
    assert status_of(redis, job_id) == "failed"


def test_a_job_that_expired_in_the_queue_is_not_run(
    redis: Redis, station: Stations, submit: Submit
) -> None:
    job_id = submit(expires_at=1.0)
    worker = station()

    assert worker.claim_next()

    assert worker.inbox.empty()
    assert types_of(redis, job_id) == ["started", "expired"]


def test_cancelling_a_running_job_reaches_the_engine_once(
    redis: Redis, station: Stations, submit: Submit
) -> None:
    job_id = submit()
    worker = station()
    worker.claim()

    Producer(redis).cancel(job_id)
    worker.intake._look()
    worker.intake._cancels_due_s = 0.0
    worker.intake._look()

    assert worker.inbox.get(timeout=10) == Cancel(job_id)
    assert worker.inbox.empty()


def test_a_job_that_rq_cancelled_behind_our_back_ends_as_cancelled(
    redis: Redis, station: Stations, submit: Submit
) -> None:
    job_id = submit()
    worker = station()
    worker.claim()
    redis.hset(f"rq:job:{job_id}", "status", JobStatus.CANCELED.value)

    worker.publisher.end(job_id, FINISHED)
    assert worker.publisher.wait_until_closed(10)

    assert types_of(redis, job_id) == ["started", "cancelled"]
    assert status_of(redis, job_id) == "canceled"
    assert rq_counts(redis)["started"] == 0


def test_an_id_lost_between_queue_and_execution_is_put_back(
    redis: Redis, station: Stations, submit: Submit
) -> None:
    job_id = submit()
    worker = station()
    names = ("rq:queue:" + QUEUE, "rq:queue:" + QUEUE + ":intermediate")
    redis.lmove(*names)
    now = [0.0]
    worker.maintenance._clock = lambda: now[0]

    worker.maintenance.run_once()
    assert not worker.claim_next()
    now[0] = 1.5
    worker.maintenance.run_once()

    assert worker.claim().job_id == job_id


def test_a_job_that_rq_abandoned_without_an_end_is_queued_again(
    redis: Redis, station: Stations, submit: Submit
) -> None:
    job_id = submit()
    worker, other = station(), station()
    worker.claim()
    redis.hset(f"rq:job:{job_id}", "status", JobStatus.FAILED.value)
    redis.zrem(f"rq:wip:{QUEUE}", *redis.zrange(f"rq:wip:{QUEUE}", 0, -1))
    redis.zadd(f"rq:failed:{QUEUE}", {job_id: 2e9})

    other.maintenance.run_once()

    assert other.claim().attempt == 2


def test_an_end_that_comes_after_rq_gave_the_job_up_cancels_nothing(
    redis: Redis, station: Stations, submit: Submit
) -> None:
    job_id = submit()
    worker, other = station(), station()
    worker.claim()
    redis.hset(f"rq:job:{job_id}", "status", JobStatus.FAILED.value)
    redis.zrem(f"rq:wip:{QUEUE}", *redis.zrange(f"rq:wip:{QUEUE}", 0, -1))
    redis.zadd(f"rq:failed:{QUEUE}", {job_id: 2e9})

    worker.publisher.delta(job_id, [part(0, 1)])
    worker.publisher.end(job_id, FINISHED)
    assert worker.inbox.get(timeout=10) == Drop(job_id)
    other.maintenance.run_once()

    assert types_of(redis, job_id) == ["started", "delta"]
    assert other.claim().history == (part(0, 1),)


def test_racing_ends_leave_exactly_one(redis: Redis, station: Stations, submit: Submit) -> None:
    for _ in range(20):
        job_id = submit()
        worker = station()
        worker.claim()
        in_threads(
            lambda job=job_id, w=worker: w.publisher.end(job, FINISHED),
            lambda job=job_id: Producer(redis).cancel(job),
            lambda job=job_id: JobStreams(redis).close(job, Expired(), 60_000),
        )
        assert worker.publisher.wait_until_closed(10)
        ends = [entry for entry in JobStreams(redis).read(job_id) if entry.is_end]
        assert len(ends) == 1


def test_an_execution_that_lapsed_is_not_brought_back(
    redis: Redis, station: Stations, submit: Submit
) -> None:
    job_id = submit()
    worker = station()
    claim = worker.claim()
    redis.delete(f"rq:execution:{job_id}:{claim.execution_id}")

    worker.heartbeat.beat()

    assert worker.inbox.get(timeout=10) == Drop(job_id)
    assert not redis.exists(f"rq:execution:{job_id}:{claim.execution_id}")


def test_a_worker_whose_record_expired_is_visible_again(redis: Redis, station: Stations) -> None:
    worker = station()
    redis.delete(f"rq:worker:{worker.worker_id}")
    redis.srem("rq:workers", f"rq:worker:{worker.worker_id}")

    worker.heartbeat.beat()

    assert redis.sismember("rq:workers", f"rq:worker:{worker.worker_id}")
    assert redis.hget(f"rq:worker:{worker.worker_id}", "hostname")


def test_our_counts_are_rqs_at_every_stage(redis: Redis, station: Stations, submit: Submit) -> None:
    worker = station()

    def assert_equal(**expected: int) -> None:
        (ours,) = read_status(redis).queues
        theirs = rq_counts(redis)
        assert theirs == dict.fromkeys(theirs, 0) | expected
        assert theirs == {
            "queued": ours.depth,
            "started": ours.started,
            "finished": ours.finished,
            "failed": ours.failed,
            "canceled": ours.canceled,
        }

    jobs = [submit() for _ in range(5)]
    assert_equal(queued=5)
    for _ in range(4):
        worker.claim()
    assert_equal(queued=1, started=4)
    worker.publisher.end(jobs[0], FINISHED)
    worker.publisher.end(jobs[1], Failed(code="x", message="y"))
    _wait_for_open(worker, 2)
    assert_equal(queued=1, started=2, finished=1, failed=1)
    worker.publisher.release(jobs[2], "drain")
    _wait_for_open(worker, 1)
    assert_equal(queued=2, started=1, finished=1, failed=1)
    Producer(redis).cancel(jobs[4])
    assert_equal(queued=1, started=1, finished=1, failed=1, canceled=1)


def _wait_for_open(worker: Station, count: int) -> None:
    with worker.publisher._lock:
        assert worker.publisher._lock.wait_for(lambda: worker.publisher.num_open == count, 10)


def test_what_an_earlier_attempt_said_is_resumed(
    redis: Redis, station: Stations, submit: Submit
) -> None:
    job_id = submit()
    first = station()
    first.claim()
    first.publisher.release(job_id, "drain")
    assert first.publisher.wait_until_closed(10)
    second = station()
    second.claim()

    events = [entry.event for entry in JobStreams(redis).read(job_id)]
    assert [type(event) for event in events] == [Started, Released, Resumed]


def test_a_heartbeat_carries_the_servers_time(redis: Redis, station: Stations) -> None:
    worker = station()
    before_s = redis.time()[0]
    worker.heartbeat.beat()
    after_s = redis.time()[0]

    value = redis.get(keys.worker_key(worker.worker_id))

    assert isinstance(value, bytes)
    assert before_s <= WorkerStatus.decode(value).at_ms // 1000 <= after_s
