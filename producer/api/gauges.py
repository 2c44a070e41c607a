"""What /metrics reads at a scrape: queues, workers, and how the server behind them is."""

from collections import Counter
from typing import Any

from headwater.schemas import keys
from redis import Redis
from redis.exceptions import RedisError

from ..status import QueueStatus, Status, read_status
from .metrics import ApiMetrics

_REFUSALS = ("OOM", "MISCONF", "READONLY", "NOREPLICAS", "LOADING", "MASTERDOWN", "NOPERM")
"""Codes of writes that a server refuses, and of users who try what they may not."""


def read_gauges(redis: Redis, metrics: ApiMetrics) -> None:
    """Set the gauges that are read when asked for; without Redis only that it is away."""
    try:
        found, info = read_status(redis), _info(redis)
        quarantined = {model: _num_quarantined(redis, model) for model in _models(found)}
    except RedisError:
        metrics.redis_up.set(0)
        return  # the other figures are wanted most when Redis is away
    metrics.redis_up.set(1)
    _set_queues(metrics, found)
    _set_server(metrics, info)
    metrics.quarantined.clear()
    for model, num_ids in quarantined.items():
        metrics.quarantined.labels(model).set(num_ids)


def _set_queues(metrics: ApiMetrics, found: Status) -> None:
    for gauge in (metrics.queue_depth, metrics.oldest_wait, metrics.workers):
        gauge.clear()
    for queue in found.queues:
        labels = (_model_of(queue), queue.name)
        metrics.queue_depth.labels(*labels).set(queue.depth)
        metrics.oldest_wait.labels(*labels).set(queue.oldest_age_s or 0.0)
    num_workers = Counter(worker.status.alias for worker in found.workers)
    for model in _models(found):
        metrics.workers.labels(model).set(num_workers[model])


def _set_server(metrics: ApiMetrics, info: dict[str, Any]) -> None:
    metrics.redis_memory.set(info.get("used_memory", 0))
    metrics.redis_max_memory.set(info.get("maxmemory", 0))
    metrics.redis_aof_ok.set(info.get("aof_last_write_status") == "ok")
    metrics.redis_persists.set(info.get("aof_enabled", 0))
    for code in _REFUSALS:
        count = info.get(f"errorstat_{code}", {"count": 0})["count"]
        metrics.redis_refusals.labels(code).set(count)


def _info(redis: Redis) -> dict[str, Any]:
    # redis-py types every reply as possibly awaitable.
    info: Any = redis.info()
    return dict(info)


def _num_quarantined(redis: Redis, model: str) -> int:
    length: Any = redis.llen(keys.quarantine_key(model))
    return int(length)


def _models(found: Status) -> list[str]:
    """Return the aliases that have a queue or a worker."""
    served = (worker.status.alias for worker in found.workers)
    return sorted({*map(_model_of, found.queues), *served})


def _model_of(queue: QueueStatus) -> str:
    return queue.name.partition(".")[0]
