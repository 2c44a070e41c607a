"""Our jobs as RQ jobs: how they are enqueued, how their state is read. The only rq here."""

import zlib
from collections.abc import Iterable, Sequence
from enum import StrEnum
from typing import Any, NamedTuple

from headwater.schemas import GenerationJob, OrjsonSerializer, keys, limits
from redis import Redis
from rq import Queue, Retry
from rq.job import Job, JobStatus
from rq.registry import (
    CanceledJobRegistry,
    FailedJobRegistry,
    FinishedJobRegistry,
    StartedJobRegistry,
)

from .errors import PayloadTooLarge

JOB_RETENTION_S = 24 * 3600
"""How long RQ keeps an ended job: longer than its stream, so that a reader can tell a stream
that has expired from a job that never was."""

RQ_FIELDS = ("status", "origin")
"""The fields of RQ's job hash that parse_rq_job needs."""

_MAX_RETRIES = 1_000_000
"""RQ's own counter must never end a job: the worker's strikes do."""


class JobState(StrEnum):
    """RQ's state of a job, as far as it matters to a caller."""

    QUEUED = "queued"
    RUNNING = "running"
    ENDED = "ended"


class RQJob(NamedTuple):
    """What RQ knows of a job."""

    state: JobState
    status: str
    queue_name: str


def job_key(job_id: str) -> str:
    """Return the key of RQ's hash for the job."""
    return Job.key_for(job_id)


class QueueKeys(NamedTuple):
    """The keys of one RQ queue: the list of waiting ids, and the registries."""

    waiting: str
    started: str
    finished: str
    failed: str
    canceled: str


def queue_keys(name: str) -> QueueKeys:
    """Return RQ's keys for the queue *name*."""
    registries = (StartedJobRegistry, FinishedJobRegistry, FailedJobRegistry, CanceledJobRegistry)
    templates = (kind.key_template for kind in registries)
    return QueueKeys(
        f"{Queue.redis_queue_namespace_prefix}{name}", *(t.format(name) for t in templates)
    )


QUEUES_KEY: str = Queue.redis_queues_keys
"""RQ's set of the keys of all queues with work, others' too."""


def models_of(listed: Iterable[bytes]) -> set[str]:
    """Return the aliases whose queues may be among the keys *listed* in RQ's set."""
    prefix = Queue.redis_queue_namespace_prefix
    names = (key.decode("utf-8", "replace").removeprefix(prefix).split(".") for key in listed)
    return {parts[0] for parts in names if len(parts) == 3 and parts[1] in keys.PRIORITIES}


def parse_rq_job(reply: Sequence[Any]) -> RQJob | None:
    """Return RQ's view of a job from its hash's RQ_FIELDS; None when RQ knows no such job."""
    status, origin = ((value or b"").decode("utf-8", "replace") for value in reply)
    return RQJob(_state(status), status, origin) if status else None


def read_payload(data: bytes | None) -> GenerationJob | None:
    """Return the job in the `data` field of RQ's hash; None where it can't be read.

    Inflates a bounded number of bytes and imports nothing that the payload names.
    """
    try:
        raw = zlib.decompressobj().decompress(data or b"", limits.MAX_PAYLOAD_BYTES)
        _, _, arguments, _ = OrjsonSerializer.loads(raw)
        return GenerationJob.parse(arguments[0])
    except (zlib.error, ValueError, TypeError, LookupError):
        return None


class JobQueue:
    """RQ's queues on one server, seen as a place for GenerationJobs.

    *pipeline* is a redis Pipeline, whose methods redis-py leaves half typed.
    """

    def __init__(self, redis: Redis) -> None:
        self._redis = redis
        self._queues: dict[str, Queue] = {}

    def push(self, pipeline: Any, jobs: Sequence[GenerationJob]) -> None:
        """Add each job's hash and its place in its queue; raises PayloadTooLarge.

        A wish to cancel an earlier job of the same id, which outlives that job, does not hold.
        """
        for job in jobs:
            queue = self._queue(keys.job_queue_name(job))
            rq_job = self._rq_job(job)
            _check_size(rq_job)
            pipeline.delete(keys.cancel_key(job.job_id))
            pipeline.sadd(keys.active_queues_key(job.model), queue.name)
            queue.enqueue_job(rq_job, pipeline=pipeline)
        for model in {job.model for job in jobs}:
            pipeline.publish(keys.bell_channel(model), b"")

    def holds(self, pipeline: Any, jobs: Sequence[GenerationJob]) -> bool:
        """Whether exactly these jobs (the seeds that we drew included) were pushed already."""
        return all(
            pipeline.hget(job_key(job.job_id), "data") == zlib.compress(self._rq_job(job).data)
            for job in jobs
        )

    def depths(self, pipeline: Any, queue_names: Sequence[str]) -> list[int]:
        """Return how many jobs wait in each queue; reads at once, on a watching pipeline."""
        return [int(pipeline.llen(self._queue(name).key)) for name in queue_names]

    def mark_cancelled(self, pipeline: Any, job_id: str, queue_name: str) -> None:
        """Take a queued job out of its queue and record it as cancelled, for a finite time."""
        queue = self._queue(queue_name)
        job = Job(id=job_id, connection=self._redis, serializer=OrjsonSerializer)
        registry = CanceledJobRegistry(queue=queue)
        queue.remove(job_id, pipeline=pipeline)
        job.set_status(JobStatus.CANCELED, pipeline=pipeline)
        pipeline.expire(job.key, JOB_RETENTION_S)
        registry.add(job, ttl=JOB_RETENTION_S, pipeline=pipeline)
        # RQ never sweeps this registry.
        pipeline.expire(registry.key, JOB_RETENTION_S)

    def _rq_job(self, job: GenerationJob) -> Job:
        return Job.create(
            keys.JOB_FUNCTION,
            args=(job.model_dump(mode="json", exclude_none=True),),
            connection=self._redis,
            id=job.job_id,
            # RQ's default description is the whole call, prompt included.
            description=f"generate {job.job_id}",
            # RQ's heartbeat arithmetic goes negative past a timeout; deadlines are ours.
            timeout=-1,
            result_ttl=JOB_RETENTION_S,
            failure_ttl=JOB_RETENTION_S,
            retry=Retry(max=_MAX_RETRIES, enqueue_at_front=True),
            serializer=OrjsonSerializer,
        )

    def _queue(self, name: str) -> Queue:
        queue = self._queues.get(name)
        if queue is None:
            queue = Queue(name, connection=self._redis, serializer=OrjsonSerializer)
            self._queues[name] = queue
        return queue


def queue_names(jobs: Iterable[GenerationJob]) -> list[str]:
    """Return the distinct queues of *jobs*."""
    return sorted({keys.job_queue_name(job) for job in jobs})


def _state(status: str) -> JobState:
    if status in (JobStatus.FINISHED, JobStatus.FAILED, JobStatus.CANCELED, JobStatus.STOPPED):
        return JobState.ENDED
    return JobState.RUNNING if status == JobStatus.STARTED else JobState.QUEUED


def _check_size(rq_job: Job) -> None:
    size = len(rq_job.data)
    if size > limits.MAX_PAYLOAD_BYTES:
        raise PayloadTooLarge(
            f"job {rq_job.id} is {size} bytes; at most {limits.MAX_PAYLOAD_BYTES} are allowed"
        )
    # Compression never makes JSON larger by more than a few bytes: only large ones are tried.
    if size > limits.MAX_COMPRESSED_PAYLOAD_BYTES:
        compressed = len(zlib.compress(rq_job.data))
        if compressed > limits.MAX_COMPRESSED_PAYLOAD_BYTES:
            raise PayloadTooLarge(
                f"job {rq_job.id} is {compressed} bytes compressed; at most "
                f"{limits.MAX_COMPRESSED_PAYLOAD_BYTES} are allowed"
            )
