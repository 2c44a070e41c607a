import queue
from collections.abc import Iterator

import pytest
from headwater.schemas import OrjsonSerializer
from headwater.worker.intake.listener import Listener
from headwater.worker.messages import Cancel, Message
from headwater.worker.redis_client import connect
from redis import Redis
from rq.command import send_stop_job_command

from .conftest import Station, Stations, Submit


@pytest.fixture
def worker(redis_url: str, station: Stations) -> Iterator[Station]:
    """A station that listens."""
    one = station()
    listener = Listener(
        connect(redis_url),
        one.worker_id,
        "m",
        claims=one.publisher.open_claims,
        post=one.inbox.put,
        ring=one.intake.ring,
        hurry=one.heartbeat.hurry,
        on_death=one.deaths.append,
    )
    listener.start()
    assert listener.is_subscribed.wait(10)
    yield one
    listener.stop()


def test_rqs_stop_command_reaches_the_second_job_too(
    redis: Redis, worker: Station, submit: Submit
) -> None:
    jobs = [submit(), submit()]
    for _ in jobs:
        worker.claim()

    send_stop_job_command(redis, jobs[1], serializer=OrjsonSerializer)

    assert worker.inbox.get(timeout=10) == Cancel(jobs[1])
    assert worker.inbox.empty()


@pytest.mark.parametrize("data", [b"", b"[1]", b"{}", b"\xff", b'{"command": "stop-job"}'])
def test_what_is_no_command_is_ignored(
    redis: Redis, worker: Station, submit: Submit, data: bytes
) -> None:
    job_id = submit()
    worker.claim()

    redis.publish(f"rq:pubsub:{worker.worker_id}", data)
    send_stop_job_command(redis, job_id, serializer=OrjsonSerializer)

    assert worker.inbox.get(timeout=10) == Cancel(job_id)


def test_commands_are_obeyed_again_after_the_connection_was_cut(
    redis: Redis, worker: Station, submit: Submit
) -> None:
    job_id = submit()
    worker.claim()
    redis.client_kill_filter(_type="pubsub")

    assert _stop_until_heard(redis, worker, job_id) == Cancel(job_id)


def _stop_until_heard(redis: Redis, worker: Station, job_id: str) -> Message | None:
    """Repeat the command: nobody receives what is published before the worker listens again."""
    for _ in range(100):
        send_stop_job_command(redis, job_id, serializer=OrjsonSerializer)
        try:
            return worker.inbox.get(timeout=0.2)
        except queue.Empty:
            continue
    return None
