"""What is going on: queues with their depths, workers with their figures."""

from datetime import UTC, datetime
from typing import Any, NamedTuple

from headwater.schemas import SchemaError, WorkerStatus, keys
from redis import Redis

from .client_queue import QUEUES_KEY, QueueKeys, job_key, models_of, queue_keys

_MAX_IDLE_QUEUES = 64
"""Queues without work that are shown, those that had some last."""


class QueueStatus(NamedTuple):
    """One queue's counts, as RQ's registries hold them."""

    name: str
    depth: int
    """Jobs that wait."""
    oldest_age_s: float | None
    """How long the job at the front has waited since it was enqueued."""
    started: int
    finished: int
    failed: int
    canceled: int


class LiveWorker(NamedTuple):
    """A worker whose lease has not run out."""

    status: WorkerStatus
    heartbeat_age_s: float
    lease_left_s: float


class Status(NamedTuple):
    """Everything that `headwater status` shows."""

    queues: list[QueueStatus]
    workers: list[LiveWorker]
    at_s: float = 0.0
    """The server's clock, Unix seconds."""


def read_status(redis: Redis) -> Status:
    """Return the present state; ages are by the server's clock. Changes nothing.

    Looks at queues and workers that are listed, never at all keys.
    """
    now_s = _now_s(redis)
    workers = _read_workers(redis, now_s)
    names = _queue_names(redis, {worker.status.alias for worker in workers}, now_s)
    return Status(_read_queues(redis, sorted(names), now_s), workers, now_s)


def read_workers(redis: Redis) -> list[LiveWorker]:
    """Return the workers that are alive, by id."""
    return _read_workers(redis, _now_s(redis))


def _now_s(redis: Redis) -> float:
    """Return the server's time, Unix seconds."""
    seconds, microseconds = redis.time()
    return seconds + microseconds / 1e6


def _queue_names(redis: Redis, served: set[str], now_s: float) -> set[str]:
    """Return the queues with work, and those that had some lately.

    *served* are aliases that have workers: RQ's tools may have taken names out of RQ's set.
    """
    # It may name queues of others: ours are those that stand in a set of ours, too.
    listed: Any = redis.smembers(QUEUES_KEY)
    pipeline: Any = redis.pipeline(transaction=False)
    for model in sorted(models_of(listed) | served):
        pipeline.smembers(keys.active_queues_key(model))
    lately = {"desc": True, "byscore": True, "offset": 0, "num": _MAX_IDLE_QUEUES}
    pipeline.zrange(keys.idle_queues_key(), "+inf", now_s, **lately)
    return {name.decode() for names in pipeline.execute() for name in names}


def _read_queues(redis: Redis, queue_names: list[str], now_s: float) -> list[QueueStatus]:
    pipeline: Any = redis.pipeline(transaction=False)
    for names in map(queue_keys, queue_names):
        pipeline.lindex(names.waiting, 0)
        pipeline.llen(names.waiting)
        for registry in names[1:]:
            pipeline.zcard(registry)
    replies = pipeline.execute()
    size = len(QueueKeys._fields) + 1
    parts = [replies[at : at + size] for at in range(0, len(replies), size)]
    ages = _ages_s(redis, [first for first, *_ in parts], now_s)
    return [
        QueueStatus(name, depth, age_s, *counts)
        for name, age_s, (_, depth, *counts) in zip(queue_names, ages, parts, strict=True)
    ]


def _ages_s(redis: Redis, job_ids: list[bytes | None], now_s: float) -> list[float | None]:
    pipeline: Any = redis.pipeline(transaction=False)
    for job_id in job_ids:
        pipeline.hget(job_key(job_id.decode("utf-8", "replace") if job_id else ""), "enqueued_at")
    # A damaged hash has no age, and must not hide all that is well.
    return [_age_s(found, now_s) for found in pipeline.execute(raise_on_error=False)]


def _age_s(enqueued_at: Any, now_s: float) -> float | None:
    try:
        at = datetime.strptime(enqueued_at.decode(), "%Y-%m-%dT%H:%M:%S.%fZ")
    except (AttributeError, ValueError):
        return None  # nothing waits, or the job was taken in this moment
    return max(0.0, now_s - at.replace(tzinfo=UTC).timestamp())


def _read_workers(redis: Redis, now_s: float) -> list[LiveWorker]:
    listed: Any = redis.zrange(keys.workers_key(), 0, -1)
    worker_ids = sorted(worker_id.decode() for worker_id in listed)
    pipeline: Any = redis.pipeline(transaction=False)
    for worker_id in worker_ids:
        pipeline.get(keys.worker_key(worker_id))
        pipeline.pttl(keys.worker_key(worker_id))
    replies = pipeline.execute()
    leases = zip(worker_ids, replies[::2], replies[1::2], strict=True)
    return [
        _live_worker(worker_id, value, ttl_ms, now_s)
        for worker_id, value, ttl_ms in leases
        if value is not None  # the lease has lapsed
    ]


def _live_worker(worker_id: str, value: bytes, ttl_ms: int, now_s: float) -> LiveWorker:
    try:
        status = WorkerStatus.decode(value)
    except SchemaError:
        # A worker of another version is alive all the same.
        status = WorkerStatus(worker_id=worker_id)
    return LiveWorker(status, max(0.0, now_s - status.at_ms / 1000), max(0, ttl_ms) / 1000)
