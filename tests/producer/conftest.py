"""What a worker would do to a job's stream and its RQ state, by hand."""

from collections.abc import Callable

import pytest
from headwater.producer.client_queue import job_key
from headwater.schemas import Event, encode_fields, keys
from redis import Redis

WriteEntry = Callable[[str, str, Event], None]
SetStatus = Callable[[str, str], None]


@pytest.fixture
def write(redis: Redis) -> WriteEntry:
    """Append an entry, `write(job_id, "1-0", event)`."""

    def write(job_id: str, entry_id: str, event: Event) -> None:
        redis.xadd(keys.stream_key(job_id), encode_fields(event), id=entry_id)
        redis.set(keys.attempt_key(job_id), entry_id.partition("-")[0])

    return write


@pytest.fixture
def set_status(redis: Redis) -> SetStatus:
    """Give a job a status in RQ, `set_status(job_id, "started")`."""

    def set_status(job_id: str, status: str) -> None:
        redis.hset(job_key(job_id), mapping={"status": status, "origin": "demo.normal.default"})

    return set_status
