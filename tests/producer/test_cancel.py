"""Cancelling: who writes the end, and that there is one."""

from concurrent.futures import ThreadPoolExecutor

from headwater.producer.client import CancelOutcome, Producer
from headwater.producer.client_queue import job_key
from headwater.producer.tail import Ended
from headwater.schemas import Cancelled, OrjsonSerializer, Started, keys
from redis import Redis
from rq.job import Job

from .conftest import SetStatus, WriteEntry
from .demo_queue import job, queued_ids


def test_a_connection_that_breaks_before_a_cancel_is_sent_costs_nothing(
    producer: Producer, broken_watches: list[str]
) -> None:
    job_id = producer.submit(job())

    assert producer.cancel(job_id) is CancelOutcome.CANCELLED
    assert len(broken_watches) > 1


def test_a_wish_to_cancel_does_not_outlive_its_job(redis: Redis, producer: Producer) -> None:
    first = producer.submit(job(), idempotency_key="k")
    producer.cancel(first)
    redis.delete(job_key(first), keys.stream_key(first))  # they lapse days before the wish

    assert producer.submit(job(), idempotency_key="k") == first
    assert not redis.exists(keys.cancel_key(first))


def test_a_queued_job_is_cancelled_at_once(redis: Redis, producer: Producer) -> None:
    kept, job_id = producer.submit_many([job(), job()])

    assert producer.cancel(job_id) is CancelOutcome.CANCELLED
    assert queued_ids(redis) == [kept]
    (*_, end) = producer.tail(job_id)
    assert isinstance(end, Ended)
    assert isinstance(end.event, Cancelled)
    assert Job.fetch(job_id, connection=redis, serializer=OrjsonSerializer).is_canceled


def test_a_cancelled_job_leaves_nothing_without_an_expiry(redis: Redis, producer: Producer) -> None:
    before = set(redis.keys())
    producer.cancel(producer.submit(job()))

    lasting = {b"rq:queues", keys.active_queues_key("demo").encode()}
    new = set(redis.keys()) - before - lasting
    assert len(new) >= 4
    assert [key for key in new if redis.ttl(key) < 0] == []


def test_a_running_job_is_asked_to_end(
    redis: Redis, producer: Producer, set_status: SetStatus
) -> None:
    set_status("job", "started")

    assert producer.cancel("job") is CancelOutcome.REQUESTED
    assert producer.cancel("job") is CancelOutcome.REQUESTED
    assert redis.ttl(keys.cancel_key("job")) > 0
    assert not redis.exists(keys.stream_key("job"))


def test_an_ended_job_stays_as_it_ended(
    redis: Redis, producer: Producer, write: WriteEntry, set_status: SetStatus
) -> None:
    set_status("job", "started")
    write("job", "1-0", Started(worker_id="w", sampler_version=1))
    write("job", "1-1", Cancelled())

    assert producer.cancel("job") is CancelOutcome.ALREADY_ENDED
    assert redis.xlen(keys.stream_key("job")) == 2


def test_cancelling_again_changes_nothing(redis: Redis, producer: Producer) -> None:
    job_id = producer.submit(job())
    producer.cancel(job_id)
    entries = redis.xrange(keys.stream_key(job_id))

    assert producer.cancel(job_id) is CancelOutcome.ALREADY_ENDED
    assert redis.xrange(keys.stream_key(job_id)) == entries


def test_cancelling_an_unknown_job_says_so(redis: Redis, producer: Producer) -> None:
    assert producer.cancel("nobody") is CancelOutcome.UNKNOWN
    assert not redis.exists(keys.cancel_key("nobody"))


def test_many_cancels_at_once_leave_one_end(redis: Redis, producer: Producer) -> None:
    for _ in range(10):
        job_id = producer.submit(job())
        with ThreadPoolExecutor(6) as pool:
            outcomes = list(pool.map(producer.cancel, [job_id] * 6))
        assert outcomes.count(CancelOutcome.CANCELLED) == 1
        ends = [e for e in redis.xrange(keys.stream_key(job_id)) if b"end" in e[1]]
        assert len(ends) == 1


def test_a_cancelled_job_that_is_resumed_ends_behind_its_text(
    redis: Redis, producer: Producer, write: WriteEntry
) -> None:
    job_id = producer.submit(job())
    write(job_id, "3-0", Started(worker_id="w", sampler_version=1))

    producer.cancel(job_id)

    assert [item.id.attempt for item in producer.tail(job_id)][-1] == 4


def test_an_end_that_a_cancel_writes_echoes_the_jobs_metadata(producer: Producer) -> None:
    job_id = producer.submit(job(metadata={"row": 7}))
    producer.cancel(job_id)

    assert producer.result(job_id).end == Cancelled(metadata={"row": 7})
