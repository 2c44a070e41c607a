"""What is going on: queues with their depths, workers with their figures."""

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any, NamedTuple

from headwater.schemas import SchemaError, WorkerStatus, keys
from redis import Redis

from .client_queue import job_key, queue_keys


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
    """Return the present state; ages are by the server's clock. Changes nothing."""
    now_s = _now_s(redis)
    names = sorted(_queue_names(redis))
    queues = [_read_queue(redis, name, now_s) for name in names]
    return Status(queues, read_workers(redis), now_s)


def read_workers(redis: Redis) -> list[LiveWorker]:
    """Return the workers that are alive, by id."""
    found = _read_workers(redis, _now_s(redis))
    return sorted(found, key=lambda worker: worker.status.worker_id)


def _now_s(redis: Redis) -> float:
    """Return the server's time, Unix seconds."""
    seconds, microseconds = redis.time()
    return seconds + microseconds / 1e6


def _queue_names(redis: Redis) -> set[str]:
    found: set[str] = set()
    for key in redis.scan_iter(match=keys.active_queues_key("*"), count=1000):
        names: Any = redis.smembers(key)
        found.update(name.decode() for name in names)
    return found


def _read_queue(redis: Redis, name: str, now_s: float) -> QueueStatus:
    names = queue_keys(name)
    pipeline: Any = redis.pipeline(transaction=False)
    pipeline.llen(names.waiting)
    pipeline.lindex(names.waiting, 0)
    for registry in names[1:]:
        pipeline.zcard(registry)
    depth, first_id, *counts = pipeline.execute()
    age_s = None if first_id is None else _age_s(redis, first_id.decode(), now_s)
    return QueueStatus(name, depth, age_s, *counts)


def _age_s(redis: Redis, job_id: str, now_s: float) -> float | None:
    enqueued_at: Any = redis.hget(job_key(job_id), "enqueued_at")
    try:
        at = datetime.strptime(enqueued_at.decode(), "%Y-%m-%dT%H:%M:%S.%fZ")
    except (AttributeError, ValueError):
        return None  # the job was taken in this moment, or its hash is damaged
    return max(0.0, now_s - at.replace(tzinfo=UTC).timestamp())


def _read_workers(redis: Redis, now_s: float) -> Iterator[LiveWorker]:
    for key in redis.scan_iter(match=keys.worker_key("*"), count=1000):
        pipeline: Any = redis.pipeline(transaction=False)
        pipeline.get(key)
        pipeline.pttl(key)
        value, ttl_ms = pipeline.execute()
        if value is None:
            continue  # the lease ran out in this moment
        try:
            status = WorkerStatus.decode(value)
        except SchemaError:
            # A worker of another version is alive all the same.
            status = WorkerStatus(worker_id=key.decode().removeprefix(keys.worker_key("")))
        yield LiveWorker(status, max(0.0, now_s - status.at_ms / 1000), ttl_ms / 1000)
