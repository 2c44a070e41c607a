"""The Redis side of a worker from the claim to the end, on a real server."""

import zlib
from collections.abc import Callable

import orjson
import pytest
from headwater.producer.client import Producer
from headwater.schemas import (
    Cancelled,
    Expired,
    Failed,
    Finished,
    Released,
    Restarted,
    Resumed,
    Started,
    keys,
)
from headwater.worker.messages import Cancel, Drop
from headwater.worker.streams import JobStreams
from redis import Redis
from rq import Queue
from rq.job import JobStatus

from .conftest import FINISHED, Station, in_threads, part

QUEUE = "m.normal.default"
Stations = Callable[..., Station]
Submit = Callable[..., str]


def _types(redis: Redis, job_id: str) -> list[str]:
    return [entry.event.type for entry in JobStreams(redis).read(job_id)]


def _text(redis: Redis, job_id: str) -> str:
    reader = Producer(redis)
    spans = [span for item in reader.tail(job_id) for span in getattr(item, "text", ())]
    return "".join(span.text for span in spans)


def _status(redis: Redis, job_id: str) -> str:
    return (redis.hget(f"rq:job:{job_id}", "status") or b"").decode()


def _counts(redis: Redis) -> dict[str, int]:
    """What `rq info` shows."""
    queue = Queue(QUEUE, connection=redis)
    return {
        "queued": queue.count,
        "started": queue.started_job_registry.count,
        "finished": queue.finished_job_registry.count,
        "failed": queue.failed_job_registry.count,
        "canceled": queue.canceled_job_registry.count,
    }


def test_a_job_goes_from_its_queue_to_its_end(
    redis: Redis, station: Stations, submit: Submit
) -> None:
    job_id = submit()
    worker = station()

    assert _counts(redis) == {"queued": 1, "started": 0, "finished": 0, "failed": 0, "canceled": 0}
    claim = worker.claim()
    assert _counts(redis) == {"queued": 0, "started": 1, "finished": 0, "failed": 0, "canceled": 0}
    worker.publisher.delta(job_id, [part(0, 1, 2)])
    worker.publisher.delta(job_id, [part(2, 3)])
    worker.publisher.end(job_id, FINISHED)
    assert worker.publisher.wait_until_closed(10)

    assert claim.job_id == job_id
    assert _text(redis, job_id) == "bcd"
    assert _types(redis, job_id)[0] == "started"
    assert _counts(redis) == {"queued": 0, "started": 0, "finished": 1, "failed": 0, "canceled": 0}
    assert _status(redis, job_id) == "finished"


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

    assert _status(redis, job_id) == status
    assert _counts(redis)[registry] == 1
    worker.maintenance.run_once()
    shared = {b"rq:workers", b"rq:queues", f"rq:workers:{QUEUE}".encode()}
    registries = {f"rq:{registry}:{QUEUE}".encode()}
    lasting = {key for key in redis.keys("*") if redis.ttl(key) == -1}
    assert lasting <= shared | registries


def test_a_finished_stream_is_never_generated_again(
    redis: Redis, station: Stations, submit: Submit
) -> None:
    job_id = submit()
    worker = station()
    JobStreams(redis).close(job_id, FINISHED, 60_000)

    assert worker.intake._claim_next()

    assert worker.inbox.empty()
    assert _status(redis, job_id) == "finished"
    assert _types(redis, job_id) == ["finished"]


def test_a_dead_workers_job_is_resumed_by_another(
    redis: Redis, station: Stations, submit: Submit
) -> None:
    job_id = submit()
    dead, heir = station(), station()
    dead.claim()
    dead.publisher.delta(job_id, [part(0, 1, 2)])
    _wait_for_entries(redis, job_id, 2)
    redis.delete(keys.worker_key(dead.worker_id))  # its lease lapses

    heir.maintenance.run_once()
    claim = heir.claim()

    assert claim.attempt == 2
    assert [p.token_ids for p in claim.history] == [(1, 2)]
    assert claim.strikes == 0
    heir.publisher.delta(job_id, [part(2, 3)])
    heir.publisher.end(job_id, FINISHED)
    assert heir.publisher.wait_until_closed(10)
    assert _text(redis, job_id) == "bcd"


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
    assert _types(redis, job_id) == ["started", "resumed"]


def test_a_zombies_end_is_fenced_too(redis: Redis, station: Stations, submit: Submit) -> None:
    job_id = submit()
    zombie, heir = station(), station()
    zombie.claim()
    redis.delete(keys.worker_key(zombie.worker_id))
    heir.maintenance.run_once()

    # Queued again and begun by nobody: the stream alone would still let it through.
    zombie.publisher.end(job_id, FINISHED)
    assert zombie.publisher.wait_until_closed(10)

    assert _types(redis, job_id) == ["started"]
    assert _status(redis, job_id) == "queued"
    assert heir.claim().attempt == 2


def test_a_living_workers_job_is_left_alone(station: Stations, submit: Submit) -> None:
    submit()
    worker, other = station(), station()
    worker.claim()

    other.maintenance.run_once()

    assert not other.intake._claim_next()


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

    assert _types(redis, first) == ["started", "delta", "released"]
    assert _counts(redis)["queued"] == 2
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

    assert heir.intake._claim_next()

    assert heir.inbox.empty()
    end = JobStreams(redis).read(job_id)[-1].event
    assert isinstance(end, Failed)
    assert end.code == "poisoned"
    assert _status(redis, job_id) == "failed"


def test_a_job_that_expired_in_the_queue_is_not_run(
    redis: Redis, station: Stations, submit: Submit
) -> None:
    job_id = submit(expires_at=1.0)
    worker = station()

    assert worker.intake._claim_next()

    assert worker.inbox.empty()
    assert _types(redis, job_id) == ["started", "expired"]


def test_cancelling_a_running_job_reaches_the_engine_once(
    redis: Redis, station: Stations, submit: Submit
) -> None:
    job_id = submit()
    worker = station()
    worker.claim()

    Producer(redis).cancel(job_id)
    worker.intake._look_for_cancels()
    worker.intake._next_look_s = 0.0
    worker.intake._look_for_cancels()

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

    assert _types(redis, job_id) == ["started", "cancelled"]
    assert _status(redis, job_id) == "canceled"
    assert _counts(redis)["started"] == 0


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
    assert not worker.intake._claim_next()
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


def test_a_stream_that_is_lost_while_its_job_runs_is_told_anew(
    redis: Redis, station: Stations, submit: Submit
) -> None:
    job_id = submit()
    worker = station()
    worker.claim()
    worker.publisher.delta(job_id, [part(0, 1, 2)])
    _wait_for_entries(redis, job_id, 2)
    redis.delete(keys.stream_key(job_id))

    worker.publisher.delta(job_id, [part(2, 3)])
    worker.publisher.end(job_id, FINISHED)
    assert worker.publisher.wait_until_closed(10)

    assert _types(redis, job_id) == ["restarted", "delta", "finished"]
    assert _text(redis, job_id) == "bcd"


def test_entries_that_a_fail_over_took_back_are_sent_again(
    redis: Redis, station: Stations, submit: Submit
) -> None:
    job_id = submit()
    worker = station()
    worker.claim()
    for index in range(3):
        worker.publisher.delta(job_id, [part(index, index)])
        _wait_for_entries(redis, job_id, index + 2)
    with redis.pipeline() as pipeline:  # a replica that was a second behind took over
        entries = redis.xrange(keys.stream_key(job_id))
        pipeline.delete(keys.stream_key(job_id))
        for entry_id, fields in entries[:2]:
            pipeline.xadd(keys.stream_key(job_id), fields, id=entry_id)
        pipeline.execute()

    worker.publisher.delta(job_id, [part(3, 3)])
    worker.publisher.end(job_id, FINISHED)
    assert worker.publisher.wait_until_closed(10)

    assert _text(redis, job_id) == "abcd"


def test_a_restart_voids_what_readers_have(redis: Redis, station: Stations, submit: Submit) -> None:
    job_id = submit()
    worker = station()
    worker.claim()
    worker.publisher.delta(job_id, [part(0, 1)])
    _wait_for_entries(redis, job_id, 2)
    worker.publisher.restart(job_id)
    worker.publisher.delta(job_id, [part(0, 5, 6)])
    worker.publisher.end(job_id, FINISHED)
    assert worker.publisher.wait_until_closed(10)

    events = [entry.event for entry in JobStreams(redis).read(job_id)]
    assert [type(event) for event in events[:3:2]] == [Started, Restarted]
    assert _types(redis, job_id)[2:] == ["restarted", "delta", "finished"]


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


MALFORMED = {
    "no payload": {"data": b""},
    "not zlib, not JSON": {"data": b"\x80\x04K\x01."},
    "a pickle": {"data": zlib.compress(b"\x80\x04cos\nsystem\n(S'true'\ntR.")},
    "not a call": {"data": zlib.compress(b"[1]")},
    "not a list": {"data": zlib.compress(b'{"a":1}')},
    "another function": {"data": zlib.compress(orjson.dumps(["os.system", None, ["true"], {}]))},
    "keywords": {"data": zlib.compress(orjson.dumps([keys.JOB_FUNCTION, None, [{}], {"a": 1}]))},
    "two arguments": {"data": zlib.compress(orjson.dumps([keys.JOB_FUNCTION, None, [1, 2], {}]))},
    "no job": {"data": zlib.compress(orjson.dumps([keys.JOB_FUNCTION, None, ["x"], {}]))},
    "an empty job": {"data": zlib.compress(orjson.dumps([keys.JOB_FUNCTION, None, [{}], {}]))},
    "cut short": {"data": zlib.compress(b"[" + b"1," * 999)[:20]},
    "a bomb": {"data": zlib.compress(b" " * (33 * 2**20))},
    "a weird status": {"status": b"weird"},
    "a status that is not text": {"status": b"\xff\xfe"},
}


@pytest.mark.parametrize("kind", MALFORMED)
def test_a_malformed_job_ends_as_failed_and_the_next_one_runs(
    redis: Redis, station: Stations, submit: Submit, kind: str
) -> None:
    bad = submit()
    redis.hset(f"rq:job:{bad}", mapping=MALFORMED[kind])
    good = submit()
    worker = station()

    assert worker.intake._claim_next()
    assert worker.claim().job_id == good

    end = JobStreams(redis).read(bad)[-1].event
    assert isinstance(end, Failed)
    assert end.code == "malformed_job"
    assert _status(redis, bad) == "failed"
    assert redis.lrange(keys.quarantine_key("m"), 0, -1) == [bad.encode()]
    assert redis.lrange(f"rq:queue:{QUEUE}:intermediate", 0, -1) == []


@pytest.mark.parametrize("raw", [b"\xff\xfe", b"a:b", b"", b"x" * 200, "ж".encode()])
def test_an_id_that_is_none_of_ours_is_quarantined(
    redis: Redis, station: Stations, submit: Submit, raw: bytes
) -> None:
    good = submit()
    redis.lpush(f"rq:queue:{QUEUE}", raw)
    worker = station()

    assert worker.intake._claim_next()

    assert worker.claim().job_id == good
    assert redis.lrange(keys.quarantine_key("m"), 0, -1) == [raw]


def test_a_callback_that_a_job_names_is_never_imported(
    redis: Redis, station: Stations, submit: Submit
) -> None:
    job_id = submit()
    redis.hset(f"rq:job:{job_id}", "failure_callback_name", "no_such_module.explode")
    worker = station()
    worker.claim()
    worker.publisher.end(job_id, Failed(code="x", message="y"))

    assert worker.publisher.wait_until_closed(10)
    assert _status(redis, job_id) == "failed"


def test_nothing_is_claimed_beyond_the_capacity(station: Stations, submit: Submit) -> None:
    for _ in range(3):
        submit()
    worker = station(max_claims=2)
    worker.claim()
    worker.claim()

    assert not worker.intake._claim_next()


def test_nothing_is_claimed_while_rq_is_suspended(
    redis: Redis, station: Stations, submit: Submit
) -> None:
    submit()
    worker = station()
    redis.set("rq:suspended", 1)

    assert not worker.intake._claim_next()
    redis.delete("rq:suspended")
    assert worker.claim()


def test_higher_classes_come_first_and_namespaces_take_turns(
    station: Stations, submit: Submit
) -> None:
    for _ in range(4):
        submit(namespace="loud")
    quiet = submit(namespace="quiet")
    urgent = submit(priority="high", namespace="loud")
    worker = station()

    order = [worker.claim().job_id for _ in range(3)]

    assert order[0] == urgent
    assert quiet in order[1:3]


def test_an_empty_queue_leaves_the_active_ones_and_comes_back(
    redis: Redis, station: Stations, submit: Submit
) -> None:
    job_id = submit()
    worker = station()
    worker.claim()
    worker.maintenance.run_once()
    assert redis.smembers(keys.active_queues_key("m")) == {QUEUE.encode()}
    worker.publisher.end(job_id, FINISHED)
    assert worker.publisher.wait_until_closed(10)

    worker.maintenance.run_once()
    assert redis.smembers(keys.active_queues_key("m")) == set()
    again = submit()

    assert worker.claim().job_id == again


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


def _wait_for_entries(redis: Redis, job_id: str, count: int) -> None:
    """Block until the stream holds so many entries."""
    last = "0-0"
    seen = 0
    while seen < count:
        reply = redis.xread({keys.stream_key(job_id): last}, block=5000)
        assert reply, f"only {seen} of {count} entries came"
        entries = reply[0][1]
        seen += len(entries)
        last = entries[-1][0]
