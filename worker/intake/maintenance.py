"""Maintenance: jobs that nobody works on go back to their queues, whoever lost them.

Any worker does it for all workers of its model. No lock: each repair is a transaction of its
own that checks the job again, so two that try the same do it once.
"""

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import structlog
from headwater.schemas import END_TYPES, SchemaError, decode_entry, keys
from redis import Redis
from redis.exceptions import RedisError, ResponseError, WatchError
from rq.job import JobStatus
from rq.registry import FailedJobRegistry

from ..booking.finalize import record_end
from ..booking.rq_jobs import RQBook, RunningJob, job_keys
from ..messages import Claim
from ..outages import Outages
from ..redis_client import is_passing
from ..watched_thread import WatchedThread
from .active_queues import ActiveQueues
from .executions import survey
from .settings import IntakeSettings

log = structlog.get_logger()

_MAX_FAILED_LOOKED_AT = 200
"""Newest failures of a queue that are checked for a missing end."""


class Maintenance:
    """One round after the other, from a thread of its own."""

    def __init__(
        self,
        redis: Redis,
        book: RQBook,
        settings: IntakeSettings,
        *,
        claims: Callable[[], Iterable[Claim]],
        on_death: Callable[[BaseException], None],
        sweep: Callable[[], None] = lambda: None,
        outages: Outages | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """*sweep* forgets the workers that died."""
        self._redis = redis
        self._book = book
        self._sweep = sweep
        self._queues = ActiveQueues(redis, settings.model, settings.retention_s)
        self._settings = settings
        self._claims = claims
        self._clock = clock
        self._outages = outages or Outages()
        self._thread = WatchedThread("maintenance", self._run, on_death)
        self._between_since: dict[tuple[str, str], float] = {}
        """When an id was first seen between its queue and an execution."""
        self._unclaimed_since: dict[RunningJob, float] = {}
        """When an execution of ours was first seen that no claim belongs to."""

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread."""
        self._thread.stop()

    def run_once(self) -> None:
        """Look at every queue of the model once; raises RedisError."""
        between: dict[tuple[str, str], float] = {}
        unclaimed: dict[RunningJob, float] = {}
        for name in self._queues.names():
            unclaimed |= self._recover_running(name)
            between |= self._recover_between(name)
            self._recover_abandoned(name)
            self._queues.retire(name)
        self._between_since = between
        self._unclaimed_since = unclaimed
        self._sweep()

    def retire_queues(self) -> None:
        """Forget queues without work, and dead workers: the last one leaves no names.

        Raises RedisError.
        """
        for name in self._queues.names():
            self._queues.retire(name)
        self._sweep()

    def _run(self) -> None:
        while not self._thread.stopping.wait(self._settings.maintenance_s):
            try:
                self.run_once()
            except RedisError as error:
                self._outages.note("maintenance_failed", error)
                # What was seen before an outage says nothing after it.
                self._unclaimed_since.clear()

    # Executions that nobody works on.

    def _recover_running(self, queue_name: str) -> dict[RunningJob, float]:
        """Put them right; return those of ours without a claim, and since when."""
        claimed = {claim.execution_id for claim in self._claims()}
        now = self._clock()
        since: dict[RunningJob, float] = {}
        for running, may_be_lost in survey(self._redis, queue_name):
            is_ours = running.worker_id == self._settings.worker_id
            if is_ours and running.execution_id not in claimed:
                # Just started or about to end; or dropped, while nobody else took it.
                since[running] = self._unclaimed_since.get(running, now)
            is_given_up = now - since.get(running, now) >= self._settings.lease_s
            if is_given_up or may_be_lost:
                with self._alone(running.job_id):
                    self._settle(running, is_given_up=is_given_up)
        return since

    @contextmanager
    def _alone(self, job_id: str) -> Iterator[None]:
        """What is wrong with one job's keys must not keep us from the others."""
        try:
            yield
        except (ResponseError, SchemaError) as error:
            if isinstance(error, RedisError) and is_passing(error):
                raise
            log.warning("unrecoverable", job_id=job_id, error=str(error))

    def _settle(self, running: RunningJob, *, is_given_up: bool) -> None:
        """Record an end that RQ does not know of; queue again what its worker will not end."""
        names = job_keys(running.job_id, running.queue_name)
        pipeline: Any  # redis-py leaves half of it untyped
        with self._redis.pipeline() as pipeline:
            # The lease, too: a worker that only paused may be back this moment.
            worker_key = keys.worker_key(running.worker_id)
            pipeline.watch(names.job, worker_key)
            status = pipeline.hget(names.job, "status")
            is_executing = pipeline.zscore(
                names.started, f"{running.job_id}:{running.execution_id}"
            )
            end = self._end_of(pipeline, running.job_id)
            is_worked_on = pipeline.exists(worker_key) and not is_given_up
            # An end and its record are one transaction: where only the end is there, it came
            # from somebody else, and the worker will not write another.
            if is_executing is None or (is_worked_on and end is None):
                return
            pipeline.multi()
            if end is not None and status == JobStatus.STARTED.value.encode():
                record_end(self._book, pipeline, running, end)
            elif status == JobStatus.STARTED.value.encode():
                self._book.requeue(pipeline, running)
            else:
                self._book.forget_execution(pipeline, running)
            if self._executed(pipeline):
                log.warning("recovered", job_id=running.job_id, worker_id=running.worker_id)

    # Ids that were taken from their queue and never started.

    def _recover_between(self, queue_name: str) -> dict[tuple[str, str], float]:
        """Put back what has waited for a lease; return what is there and since when."""
        names = job_keys("", queue_name)
        now = self._clock()
        since: dict[tuple[str, str], float] = {}
        found: Any = self._redis.lrange(names.intermediate, 0, -1)
        for raw in found:
            job_id = raw.decode("utf-8", "replace")
            first = self._between_since.get((queue_name, job_id), now)
            if now - first < self._settings.lease_s:
                since[queue_name, job_id] = first
            else:
                with self._alone(job_id):
                    self._put_back(raw, job_id, queue_name)
        return since

    def _put_back(self, raw: bytes, job_id: str, queue_name: str) -> None:
        names = job_keys(job_id, queue_name)
        pipeline: Any  # redis-py leaves half of it untyped
        with self._redis.pipeline() as pipeline:
            pipeline.watch(names.job, names.intermediate)
            is_queued = pipeline.hget(names.job, "status") == JobStatus.QUEUED.value.encode()
            pipeline.multi()
            pipeline.lrem(names.intermediate, 1, raw)
            if is_queued:
                pipeline.lpush(names.queue, raw)
            if self._executed(pipeline):
                log.warning("put_back", job_id=job_id, queue=queue_name)

    # Jobs that RQ gave up.

    def _recover_abandoned(self, queue_name: str) -> None:
        """Queue again what RQ failed although its stream has no end."""
        registry = FailedJobRegistry(queue_name, self._redis)
        found: Any = self._redis.zrange(registry.key, 0, _MAX_FAILED_LOOKED_AT - 1, desc=True)
        for raw in found:
            job_id = raw.decode("utf-8", "replace")
            running = RunningJob(job_id, queue_name, "", "")
            with self._alone(job_id):
                self._queue_again(running, registry.key)

    def _queue_again(self, running: RunningJob, registry_key: str) -> None:
        job_id = running.job_id
        names = job_keys(job_id, running.queue_name)
        pipeline: Any  # redis-py leaves half of it untyped
        with self._redis.pipeline() as pipeline:
            pipeline.watch(names.job, keys.stream_key(job_id))
            is_failed = pipeline.hget(names.job, "status") == JobStatus.FAILED.value.encode()
            has_stream = bool(pipeline.exists(keys.stream_key(job_id)))
            if not is_failed or not has_stream or self._end_of(pipeline, job_id) is not None:
                return
            pipeline.multi()
            pipeline.zrem(registry_key, job_id)
            self._book.requeue(pipeline, running)
            if self._executed(pipeline):
                log.warning("requeued", job_id=job_id, reason="RQ took it for abandoned")

    @staticmethod
    def _end_of(pipeline: Any, job_id: str) -> Any:
        found = pipeline.xrevrange(keys.stream_key(job_id), count=1)
        event = decode_entry(*found[0]).event if found else None
        return event if isinstance(event, END_TYPES) else None

    @staticmethod
    def _executed(pipeline: Any) -> bool:
        try:
            pipeline.execute()
        except WatchError:
            # Somebody else was at it; the next round looks again.
            return False
        return True
