"""Heartbeats carry what the caches hold, and bring wishes to clear them."""

import pytest
from headwater.schemas import CacheClear, CacheReport, ClearOutcome, keys
from headwater.worker.intake.listener import Listener
from headwater.worker.redis_client import connect
from redis import Redis

from .conftest import LEASE_S, Station, Stations

WISH = CacheClear(clear_id="one")


def told(redis: Redis, worker: Station) -> CacheReport | None:
    value = redis.get(keys.cache_report_key(worker.worker_id))
    return None if value is None else CacheReport.decode(value)


def wish_for(redis: Redis, worker: Station, value: bytes = WISH.encode()) -> None:
    redis.set(keys.cache_clear_key(worker.worker_id), value)


def test_a_report_lapses_with_the_lease_and_goes_with_the_worker(
    redis: Redis, station: Stations
) -> None:
    worker = station()
    wish_for(redis, worker)

    assert told(redis, worker) == worker.report
    assert 0 < redis.pttl(keys.cache_report_key(worker.worker_id)) <= 1000 * LEASE_S
    worker.heartbeat.start()
    worker.heartbeat.stop()
    names = (keys.cache_report_key, keys.cache_clear_key, keys.worker_key)
    assert redis.exists(*(name(worker.worker_id) for name in names)) == 0


def test_a_wish_reaches_the_engine_once_and_its_outcome_is_told(
    redis: Redis, station: Stations
) -> None:
    worker = station()
    wish_for(redis, worker)
    for _ in range(3):
        worker.heartbeat.beat()
    assert worker.inbox.get_nowait() == WISH
    outcome = ClearOutcome(clear_id=WISH.clear_id, memory_freed_nbytes=5)
    worker.report = worker.report.model_copy(update={"last_clear": outcome})
    for _ in range(3):
        worker.heartbeat.beat()

    assert told(redis, worker).last_clear == outcome
    assert worker.inbox.empty()


def test_a_second_wish_is_another_one(redis: Redis, station: Stations) -> None:
    worker = station()
    for clear_id in ("one", "two"):
        wish_for(redis, worker, CacheClear(clear_id=clear_id).encode())
        worker.heartbeat.beat()

        assert worker.inbox.get_nowait() == CacheClear(clear_id=clear_id)


@pytest.mark.parametrize("value", [b"", b"{}", b"[]", b"\xff", b'{"clear_id": 1}'])
def test_what_is_no_wish_is_ignored(redis: Redis, station: Stations, value: bytes) -> None:
    worker = station()
    wish_for(redis, worker, value)
    worker.heartbeat.beat()

    assert worker.inbox.empty()
    assert told(redis, worker) is not None


def test_the_next_heartbeats_come_soon_while_somebody_waits(
    redis: Redis, station: Stations
) -> None:
    caches = station().heartbeat._caches
    assert caches.next_beat_s(4.0) == 4.0
    caches.hear(WISH.encode())

    assert caches.next_beat_s(4.0) < 1.0


def test_the_bell_brings_a_wish_that_the_next_heartbeat_would_bring_much_later(
    redis: Redis, redis_url: str, station: Stations, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = station()
    monkeypatch.setattr(type(worker.settings), "heartbeat_s", 3600.0)
    listener = Listener(
        connect(redis_url),
        worker.worker_id,
        "m",
        claims=worker.publisher.open_claims,
        post=worker.inbox.put,
        ring=worker.intake.ring,
        hurry=worker.heartbeat.hurry,
        on_death=worker.deaths.append,
    )
    listener.start()
    worker.heartbeat.start()
    assert listener.is_subscribed.wait(10)
    wish_for(redis, worker)
    redis.publish(keys.bell_channel("m"), keys.CACHE_BELL)

    assert worker.inbox.get(timeout=10) == WISH
    listener.stop()
    worker.heartbeat.stop()
