"""What RQ's own tools see of workers that live and of those that died."""

from headwater.worker.intake.registration import Registration
from headwater.worker.redis_client import connect
from redis import Redis

from .conftest import LEASE_S, QUEUE


def test_the_names_of_dead_workers_are_forgotten(redis: Redis, redis_url: str) -> None:
    """RQ's sets of names have no expiry, so somebody has to take out who left without a word."""
    dead, alive = (
        Registration(connect(redis_url), name, [QUEUE], LEASE_S) for name in ("dead", "alive")
    )
    dead.register()
    alive.register()
    redis.delete("rq:worker:dead")

    alive.sweep()

    assert redis.smembers("rq:workers") == {b"rq:worker:alive"}
    assert redis.smembers(f"rq:workers:{QUEUE}") == {b"rq:worker:alive"}
