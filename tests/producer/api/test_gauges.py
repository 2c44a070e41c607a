"""What /metrics reads of queues, workers and the server at a scrape."""

import pytest
from headwater.producer.api.gauges import read_gauges
from headwater.producer.api.metrics import ApiMetrics
from headwater.producer.client import Producer, SubmitSettings, new_job
from headwater.schemas import WorkerStatus, keys
from redis import Redis
from redis.backoff import NoBackoff
from redis.exceptions import NoPermissionError
from redis.retry import Retry

from tests.announced import announce_worker


def sample(metrics: ApiMetrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(f"headwater_{name}", labels)


@pytest.fixture
def metrics() -> ApiMetrics:
    """Figures of a server of its own."""
    return ApiMetrics()


def test_a_model_that_nobody_serves_has_no_workers(redis: Redis, metrics: ApiMetrics) -> None:
    """An alert compares the two: no series would be no alert."""
    Producer(redis, SubmitSettings(check_model=False)).submit(new_job("nobody", [1], max_tokens=1))
    redis.lpush(keys.quarantine_key("nobody"), "bad")

    read_gauges(redis, metrics)

    queue = {"model": "nobody", "queue": "nobody.normal.default"}
    assert sample(metrics, "api_queue_depth", **queue) == 1
    assert sample(metrics, "api_oldest_wait_seconds", **queue) is not None
    assert sample(metrics, "api_live_workers", model="nobody") == 0
    assert sample(metrics, "api_quarantined_jobs", model="nobody") == 1


def test_workers_are_counted_by_model_and_forgotten_when_they_go(
    redis: Redis, metrics: ApiMetrics
) -> None:
    """A model whose last worker and queue are gone has no series any more."""
    for name, alias in (("w1", "a"), ("w2", "a"), ("w3", "b")):
        announce_worker(redis, WorkerStatus(worker_id=name, alias=alias))
    read_gauges(redis, metrics)
    assert sample(metrics, "api_live_workers", model="a") == 2
    assert sample(metrics, "api_live_workers", model="b") == 1

    redis.delete(keys.worker_key("w3"))
    read_gauges(redis, metrics)

    assert sample(metrics, "api_live_workers", model="b") is None


def test_what_the_server_refuses_is_counted(
    redis: Redis, redis_url: str, metrics: ApiMetrics
) -> None:
    """A full server, a full disk, and users who try what they may not."""
    redis.config_resetstat()  # other tests have filled this server on purpose
    read_gauges(redis, metrics)
    before = sample(metrics, "redis_refused_commands", error="NOPERM")
    redis.execute_command("ACL", "SETUSER", "guest", "on", ">pw", "+ping", "+hello", "+client")
    guest = Redis.from_url(redis_url.replace("redis://", "redis://guest:pw@"))
    with guest, pytest.raises(NoPermissionError):
        guest.get("x")
    redis.execute_command("ACL", "DELUSER", "guest")

    read_gauges(redis, metrics)

    assert before is not None
    assert (sample(metrics, "redis_refused_commands", error="NOPERM") or 0) > before
    assert sample(metrics, "redis_refused_commands", error="OOM") == 0


def test_the_servers_state_is_told(redis: Redis, metrics: ApiMetrics) -> None:
    """The tests' server has a limit of none, and no AOF."""
    redis.config_set("maxmemory", "100mb")
    try:
        read_gauges(redis, metrics)
    finally:
        redis.config_set("maxmemory", "0")

    assert sample(metrics, "redis_up") == 1
    assert sample(metrics, "redis_max_memory_bytes") == 100 * 2**20
    assert sample(metrics, "redis_used_memory_bytes")
    assert sample(metrics, "redis_aof_enabled") == 0


def test_a_server_that_is_away_is_told_and_nothing_raises(metrics: ApiMetrics) -> None:
    """A scrape must answer most of all when Redis does not."""
    with Redis(port=1, retry=Retry(NoBackoff(), 0)) as away:
        read_gauges(away, metrics)

    assert sample(metrics, "redis_up") == 0
