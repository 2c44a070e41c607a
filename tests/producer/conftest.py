"""A client of one announced model, and what a worker would do to its jobs, by hand."""

from collections.abc import Callable

import pytest
from headwater.producer.client import Producer
from headwater.producer.client_queue import job_key
from headwater.schemas import Event, encode_fields, keys
from redis import Redis

from tests.announced import announce_model

from .demo_queue import CARD

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


@pytest.fixture
def producer(redis: Redis) -> Producer:
    """Return a client of a server where one model is announced."""
    announce_model(redis, CARD)
    return Producer(redis)


@pytest.fixture
def broken_watches(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Break each command that first reads on a watching connection once; return their names."""
    from redis.client import Pipeline
    from redis.exceptions import WatchError

    immediate, broken = Pipeline.immediate_execute_command, []

    def execute_or_break(pipeline: Pipeline, *args: str, **options: object) -> object:
        if args[0] != "WATCH" and args[0] not in broken:
            broken.append(args[0])
            pipeline.reset()
            # What redis-py raises where a watching connection breaks.
            raise WatchError("A ConnectionError occurred on while watching one or more keys")
        return immediate(pipeline, *args, **options)

    monkeypatch.setattr(Pipeline, "immediate_execute_command", execute_or_break)
    return broken
