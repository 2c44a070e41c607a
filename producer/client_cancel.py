"""Cancelling a job: a durable wish for its worker, or its end at once while it is queued."""

from enum import Enum
from typing import Any

from headwater.schemas import Cancelled, keys
from redis import Redis

from .client_queue import (
    RQ_FIELDS,
    JobQueue,
    JobState,
    RQJob,
    job_key,
    parse_rq_job,
    read_payload,
)
from .patience import OUTAGE_S, Patience
from .stream_close import close_command

CANCEL_TTL_S = 7 * 24 * 3600
"""How long the wish is kept: longer than a job may reasonably wait and run."""


class CancelOutcome(Enum):
    """What a cancel came to."""

    CANCELLED = "cancelled"
    REQUESTED = "requested"
    ALREADY_ENDED = "already_ended"
    UNKNOWN = "unknown"

    def describe(self) -> str:
        """Return the outcome in words for a person."""
        return {
            CancelOutcome.CANCELLED: "cancelled while it was queued",
            CancelOutcome.REQUESTED: "its worker will cancel it",
            CancelOutcome.ALREADY_ENDED: "had ended already",
            CancelOutcome.UNKNOWN: "no such job (never submitted, or expired)",
        }[self]


def cancel_job(
    redis: Redis, queue: JobQueue, job_id: str, outage_s: float = OUTAGE_S
) -> CancelOutcome:
    """Cancel a job; repeating it changes nothing and repairs a cancel that was cut short."""
    patience = Patience(outage_s)
    pipeline: Any  # redis-py leaves half of it untyped
    while True:
        # The job went on meanwhile, or the connection broke: look again.
        with patience, redis.pipeline() as pipeline:
            return _try_to_cancel(pipeline, queue, job_id)


def _try_to_cancel(pipeline: Any, queue: JobQueue, job_id: str) -> CancelOutcome:
    pipeline.watch(job_key(job_id), keys.stream_key(job_id))
    has_stream, has_end = _look_at_stream(pipeline, job_id)
    rq_job = parse_rq_job(pipeline.hmget(job_key(job_id), *RQ_FIELDS))
    if has_end:
        return CancelOutcome.ALREADY_ENDED
    if rq_job is None:
        return CancelOutcome.ALREADY_ENDED if has_stream else CancelOutcome.UNKNOWN
    if rq_job.state is JobState.ENDED:
        return CancelOutcome.ALREADY_ENDED
    job = read_payload(pipeline.hget(job_key(job_id), "data"))
    end = Cancelled(metadata=job.metadata if job else {})
    pipeline.multi()
    outcome = _add_commands(pipeline, queue, job_id, rq_job, end)
    pipeline.execute()
    return outcome


def _look_at_stream(pipeline: Any, job_id: str) -> tuple[bool, bool]:
    entries = pipeline.xrevrange(keys.stream_key(job_id), count=1)
    return bool(entries), bool(entries) and b"end" in entries[0][1]


def _add_commands(
    pipeline: Any, queue: JobQueue, job_id: str, rq_job: RQJob, end: Cancelled
) -> CancelOutcome:
    pipeline.set(keys.cancel_key(job_id), b"1", ex=CANCEL_TTL_S)
    if rq_job.state is not JobState.QUEUED:
        model, _, _ = rq_job.queue_name.partition(".")
        pipeline.publish(keys.bell_channel(model), b"")
        return CancelOutcome.REQUESTED
    # A worker may hold the id in its hands without having said so in the job's hash: its
    # attempt then finds the end that we write here, and generates nothing.
    pipeline.execute_command(*close_command(job_id, end))
    queue.mark_cancelled(pipeline, job_id, rq_job.queue_name)
    return CancelOutcome.CANCELLED
