"""Which errors of the server pass, and which are faults of ours."""

import pytest
from headwater.worker.redis_client import connect, is_passing
from redis import Redis
from redis.exceptions import RedisError, ResponseError


@pytest.mark.parametrize("is_transaction", [True, False])
def test_a_full_server_is_passing_also_in_a_pipeline(redis: Redis, is_transaction: bool) -> None:
    redis.config_set("maxmemory", "1")
    try:
        with redis.pipeline(transaction=is_transaction) as pipeline:
            pipeline.set("a", "b")
            with pytest.raises(RedisError) as caught:
                pipeline.execute()
    finally:
        redis.config_set("maxmemory", "0")

    assert is_passing(caught.value)


def test_a_replica_that_takes_no_writes_is_passing(redis: Redis) -> None:
    redis.replicaof("127.0.0.1", "1")
    try:
        with redis.pipeline() as pipeline:
            pipeline.set("a", "b")
            with pytest.raises(RedisError) as caught:
                pipeline.execute()
    finally:
        redis.replicaof("NO", "ONE")

    assert is_passing(caught.value)


def test_a_refused_connection_is_passing() -> None:
    with connect("redis://127.0.0.1:1/0") as client, pytest.raises(RedisError) as caught:
        client.ping()

    assert is_passing(caught.value)


def test_a_code_that_a_pipeline_wrote_its_own_words_before_is_seen() -> None:
    text = "Command # 1 (SET a b) of pipeline caused error: MISCONF errors writing to the AOF file"

    assert is_passing(ResponseError(text))


def test_a_key_of_another_type_is_a_fault(redis: Redis) -> None:
    redis.set("a", "b")
    with pytest.raises(ResponseError) as caught:
        redis.hgetall("a")

    assert not is_passing(caught.value)


def test_a_code_in_the_name_of_a_key_makes_no_fault_passing(redis: Redis) -> None:
    redis.set("jobs:OOM", "b")
    with redis.pipeline() as pipeline:
        pipeline.hgetall("jobs:OOM")
        with pytest.raises(ResponseError) as caught:
            pipeline.execute()

    assert not is_passing(caught.value)
