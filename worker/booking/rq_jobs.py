"""RQ's bookkeeping of one job, written into transactions of ours with RQ's own keys."""

import time
from datetime import UTC, datetime
from typing import Any, NamedTuple

from headwater.schemas import OrjsonSerializer
from headwater.schemas import keys as wire_keys
from redis import Redis
from rq import Queue
from rq.executions import Execution
from rq.job import Job, JobStatus
from rq.registry import (
    BaseRegistry,
    CanceledJobRegistry,
    FailedJobRegistry,
    FinishedJobRegistry,
)
from rq.results import Result
from rq.utils import utcformat

_FAR_BACKSTOP_LEASES = 10
"""RQ's own record of an execution lapses after so many leases; ours decides long before."""

QUEUES_KEY: str = Queue.redis_queues_keys
"""RQ's set of the keys of all queues with work, others' too."""


class RunningJob(NamedTuple):
    """An RQ job in the hands of a worker."""

    job_id: str
    queue_name: str
    execution_id: str
    worker_id: str


class JobRecord(NamedTuple):
    """What RQ's hash says about a job."""

    status: str | None
    """None when there is no such job."""
    is_executing: bool
    """Whether our execution is still in the started registry."""


class JobKeys(NamedTuple):
    """RQ's names for one job and its queue."""

    job: str
    queue: str
    intermediate: str
    started: str


def job_keys(job_id: str, queue_name: str) -> JobKeys:
    """Return RQ's keys for a job of a queue."""
    queue = f"{Queue.redis_queue_namespace_prefix}{queue_name}"
    return JobKeys(
        f"{Job.redis_job_namespace_prefix}{job_id}",
        queue,
        f"{queue}:intermediate",
        f"rq:wip:{queue_name}",
    )


def read_record(pipeline: Any, running: RunningJob) -> JobRecord:
    """Read RQ's record of a job; on a watching pipeline, at once."""
    keys = job_keys(running.job_id, running.queue_name)
    status: bytes | None = pipeline.hget(keys.job, "status")
    member = f"{running.job_id}:{running.execution_id}"
    is_executing = pipeline.zscore(keys.started, member) is not None
    return JobRecord(status.decode("utf-8", "replace") if status else None, is_executing)


class RQBook:
    """Writes what RQ would write, into pipelines that the caller executes."""

    def __init__(self, redis: Redis, *, lease_s: float, retention_s: int) -> None:
        self._redis = redis
        self._execution_ttl_s = int(_FAR_BACKSTOP_LEASES * lease_s) + 1
        self._retention_s = retention_s

    def start(self, pipeline: Any, job_id: str, queue_name: str, worker_id: str) -> str:
        """Record the start of an execution and return its id; *pipeline* is in MULTI."""
        job = self._job(job_id, queue_name)
        execution = Execution.create(
            job, self._execution_ttl_s, pipeline=pipeline, worker_name=worker_id
        )
        job.prepare_for_execution(worker_id, pipeline=pipeline)
        pipeline.persist(job.key)
        pipeline.lrem(job_keys(job_id, queue_name).intermediate, 1, job_id)
        return str(execution.id)

    def finish(self, pipeline: Any, running: RunningJob) -> None:
        """Record success. The text is in the stream, not in RQ's result."""
        job = self._end(pipeline, running, JobStatus.FINISHED)
        self._register(pipeline, FinishedJobRegistry(job.origin, self._redis), job)
        Result.create(
            job, Result.Type.SUCCESSFUL, self._retention_s, return_value=None, pipeline=pipeline
        )

    def fail(self, pipeline: Any, running: RunningJob, reason: str) -> None:
        """Record failure."""
        job = self._end(pipeline, running, JobStatus.FAILED)
        self._register(pipeline, FailedJobRegistry(job.origin, self._redis), job)
        Result.create_failure(job, self._retention_s, exc_string=reason, pipeline=pipeline)

    def cancel(self, pipeline: Any, running: RunningJob) -> None:
        """Record cancellation."""
        job = self._end(pipeline, running, JobStatus.CANCELED)
        self._register(pipeline, CanceledJobRegistry(job.origin, self._redis), job)

    def requeue(self, pipeline: Any, running: RunningJob) -> None:
        """Put the job back to the front of its queue, which is known as one with work again."""
        keys = job_keys(running.job_id, running.queue_name)
        self.forget_execution(pipeline, running)
        pipeline.hset(keys.job, "status", JobStatus.QUEUED.value)
        pipeline.hdel(keys.job, "worker_name", "ended_at")
        pipeline.persist(keys.job)
        pipeline.lpush(keys.queue, running.job_id)
        model, _, _ = running.queue_name.partition(".")
        pipeline.sadd(wire_keys.active_queues_key(model), running.queue_name)
        pipeline.sadd(QUEUES_KEY, keys.queue)

    def forget_execution(self, pipeline: Any, running: RunningJob) -> None:
        """Remove every trace of an execution."""
        execution = Execution(
            running.execution_id, running.job_id, self._redis, worker_name=running.worker_id
        )
        execution.delete(job=self._job(running.job_id, running.queue_name), pipeline=pipeline)

    def touch_execution(self, pipeline: Any, running: RunningJob, now_s: float) -> None:
        """Extend an execution's life without ever bringing one back that is gone.

        The first of the commands replies 0 when the execution is gone.
        """
        execution = Execution(running.execution_id, running.job_id, self._redis)
        pipeline.expire(execution.key, self._execution_ttl_s)
        score = now_s + self._execution_ttl_s
        started = job_keys(running.job_id, running.queue_name).started
        pipeline.zadd(started, {execution.composite_key: score}, xx=True)
        executions = f"rq:executions:{running.job_id}"
        pipeline.zadd(executions, {execution.id: score + 60}, xx=True)
        pipeline.expire(executions, self._execution_ttl_s + 60)

    def _end(self, pipeline: Any, running: RunningJob, status: JobStatus) -> Job:
        job = self._job(running.job_id, running.queue_name)
        self.forget_execution(pipeline, running)
        fields = {"status": status.value, "ended_at": utcformat(datetime.now(UTC))}
        pipeline.hset(job.key, mapping=fields)
        pipeline.expire(job.key, self._retention_s)
        return job

    def _register(self, pipeline: Any, registry: BaseRegistry, job: Job) -> None:
        # FailedJobRegistry's own add() would save the job, whose hash holds more than we know.
        BaseRegistry.add(registry, job, self._retention_s, pipeline)
        # RQ sweeps some registries when it looks at them, the cancelled ones never.
        pipeline.zremrangebyscore(registry.key, 0, int(time.time()))
        pipeline.expire(registry.key, self._retention_s)

    def _job(self, job_id: str, queue_name: str) -> Job:
        job = Job(job_id, connection=self._redis, serializer=OrjsonSerializer)
        job.origin = queue_name
        return job
