"""Submitting again under a key of the caller's."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from headwater.producer.client import Producer, SubmitSettings
from headwater.producer.client_queue import job_key, queue_keys
from headwater.producer.errors import IdempotencyConflict
from headwater.schemas import keys
from redis import Redis

from .demo_queue import QUEUE, job, queued_ids


def test_the_same_request_under_one_key_is_one_job(redis: Redis, producer: Producer) -> None:
    first = producer.submit(job(), idempotency_key="k")

    assert producer.submit(job(), idempotency_key="k") == first
    assert queued_ids(redis) == [first]
    assert redis.ttl(keys.idempotency_key("default", "k")) > 0


def test_another_request_under_one_key_is_a_conflict(redis: Redis, producer: Producer) -> None:
    first = producer.submit(job(), idempotency_key="k")

    for other in (job(max_tokens=5), job(sampling={"seed": 3}), job(stop=("x",))):
        with pytest.raises(IdempotencyConflict, match=first):
            producer.submit(other, idempotency_key="k")
    assert queued_ids(redis) == [first]


def test_namespaces_have_keys_of_their_own(producer: Producer) -> None:
    first = producer.submit(job(namespace="a"), idempotency_key="k")

    assert producer.submit(job(namespace="b"), idempotency_key="k") != first


def test_a_hit_whose_job_is_gone_is_enqueued_again_under_the_same_id(
    redis: Redis, producer: Producer
) -> None:
    first = producer.submit(job(), idempotency_key="k")
    redis.delete(job_key(first), queue_keys(QUEUE).waiting)

    assert producer.submit(job(), idempotency_key="k") == first
    assert queued_ids(redis) == [first]


def test_under_a_full_queue_a_hit_is_still_a_hit(redis: Redis, producer: Producer) -> None:
    limited = Producer(redis, SubmitSettings(max_queue_depth=1))
    first = limited.submit(job(), idempotency_key="k")

    assert limited.submit(job(), idempotency_key="k") == first


def test_many_submits_under_one_key_at_once_make_one_job(redis: Redis, producer: Producer) -> None:
    ready = threading.Barrier(8)

    def submit(_: int) -> str:
        ready.wait(10)
        return producer.submit(job(), idempotency_key="k")

    for _ in range(5):
        with ThreadPoolExecutor(8) as pool:
            ids = set(pool.map(submit, range(8)))
        assert queued_ids(redis) == list(ids)
        assert len(ids) == 1
