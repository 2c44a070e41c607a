"""Registration: the worker as RQ knows it, so that `rq info` and dashboards list it."""

from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

from headwater.schemas import OrjsonSerializer
from redis import Redis
from rq import Queue, worker_registration
from rq.utils import utcformat
from rq.worker import BaseWorker, WorkerStatus

_TTL_LEASES = 10


class _Entry(BaseWorker):
    """RQ's record of us. It runs nothing: our own loop does."""


class Registration:
    """Registers, touches and removes the record. *touch* may run on another thread."""

    def __init__(self, redis: Redis, worker_id: str, queue_names: list[str], lease_s: float):
        queues = [Queue(n, connection=redis, serializer=OrjsonSerializer) for n in queue_names]
        self._redis = redis
        self._ttl_s = int(_TTL_LEASES * lease_s) + 60
        self._entry = _Entry(
            queues,
            name=worker_id,
            connection=redis,
            serializer=OrjsonSerializer,
            worker_ttl=self._ttl_s,
        )

    def register(self) -> None:
        """Appear; may be repeated."""
        # The name is ours alone: a record that exists is our own, and the reply to it was lost.
        with suppress(ValueError):
            self._entry.register_birth()  # type: ignore[no-untyped-call]
        self._entry.set_state(WorkerStatus.IDLE)

    def unregister(self) -> None:
        """Disappear."""
        self._entry.register_death()  # type: ignore[no-untyped-call]

    def sweep(self) -> None:
        """Take the names of workers that died out of RQ's sets; raises RedisError.

        Their records lapse by themselves, the sets never do.
        """
        for queue in self._entry.queues:
            worker_registration.clean_worker_registry(queue)

    def touch(self, pipeline: Any, *, is_busy: bool) -> None:
        """Extend the record's life. The first command replies more than 0 when it was gone."""
        entry = self._entry
        entry.last_heartbeat = datetime.now(UTC)
        state = WorkerStatus.BUSY if is_busy else WorkerStatus.IDLE
        fields = {"last_heartbeat": utcformat(entry.last_heartbeat), "state": state.value}
        pipeline.hset(entry.key, mapping=fields)
        pipeline.expire(entry.key, self._ttl_s)
        pipeline.expire(entry.executions_key, self._ttl_s)

    def restore(self, touched: int) -> None:
        """Register again when *touched*, the reply to the first command, says it was gone."""
        if touched:
            self._redis.hset(self._entry.key, mapping=self._entry.serialize())
            self._redis.expire(self._entry.key, self._ttl_s)
            worker_registration.register(self._entry)
