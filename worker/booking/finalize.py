"""A job's last entry and RQ's bookkeeping of it, in one transaction that checks ownership.

DESIGN: one end. The stream is the truth and RQ's state follows.
"""

from enum import Enum, auto
from typing import Any

from headwater.schemas import (
    Cancelled,
    End,
    EntryId,
    Failed,
    Finished,
    Released,
    encode_fields,
    keys,
)
from redis import Redis
from redis.exceptions import WatchError
from rq.job import JobStatus

from ..streams import Tip, read_tip
from .rq_jobs import JobRecord, RQBook, RunningJob, job_keys, read_record


class Closing(Enum):
    """What became of a job's last entry."""

    DONE = auto()
    """It is there, by this call or by an earlier one whose reply was lost."""
    NOT_OURS = auto()
    """Somebody else owns or has ended the job."""
    GONE = auto()
    """There is no such stream any more."""
    BEHIND = auto()
    """The stream does not hold what this attempt wrote before."""


class Finalizer:
    """Writes last entries. Not shared between threads."""

    def __init__(self, redis: Redis, book: RQBook, *, stream_ttl_ms: int) -> None:
        self._redis = redis
        self._book = book
        self._stream_ttl_ms = stream_ttl_ms

    def close(self, running: RunningJob, entry_id: EntryId, event: End | Released) -> Closing:
        """Write *event* as the job's entry *entry_id* and record it in RQ; may be repeated."""
        names = job_keys(running.job_id, running.queue_name)
        stream = keys.stream_key(running.job_id)
        pipeline: Any  # redis-py leaves half of it untyped
        with self._redis.pipeline() as pipeline:
            while True:
                pipeline.watch(names.job, stream)
                verdict = _judge(read_tip(pipeline, stream), entry_id)
                if verdict is not None:
                    return verdict
                record = read_record(pipeline, running)
                event_now = _event_for(record, event)
                if event_now is None:
                    return Closing.NOT_OURS
                pipeline.multi()
                self._write(pipeline, running, entry_id, event_now, record)
                try:
                    pipeline.execute()
                except WatchError:
                    # Somebody changed the job, or it was us and the reply was lost: look again.
                    continue
                return Closing.DONE

    def _write(
        self,
        pipeline: Any,
        running: RunningJob,
        entry_id: EntryId,
        event: End | Released,
        record: JobRecord,
    ) -> None:
        stream = keys.stream_key(running.job_id)
        pipeline.xadd(stream, encode_fields(event), id=str(entry_id))
        if isinstance(event, Released):
            # Others go on with it; the stream keeps its running expiry.
            self._book.requeue(pipeline, running)
            return
        pipeline.pexpire(stream, self._stream_ttl_ms)
        pipeline.pexpire(keys.attempt_key(running.job_id), 2 * self._stream_ttl_ms)
        if record.status == JobStatus.STARTED:
            record_end(self._book, pipeline, running, event)
        else:
            # RQ says how it ended already; its word stays.
            self._book.forget_execution(pipeline, running)


def record_end(book: RQBook, pipeline: Any, running: RunningJob, event: End) -> None:
    """Write RQ's state for a job that has ended with *event*."""
    if isinstance(event, Finished):
        book.finish(pipeline, running)
    elif isinstance(event, Cancelled):
        book.cancel(pipeline, running)
    else:
        reason = f"{event.code}: {event.message}" if isinstance(event, Failed) else event.type
        book.fail(pipeline, running, reason)


def _judge(last: Tip | None, entry_id: EntryId) -> Closing | None:
    """Return what the stream alone decides; None when the entry may be written."""
    if last is None:
        return Closing.GONE
    if last.id == entry_id:
        return Closing.DONE
    if last.is_end or last.id.attempt > entry_id.attempt:
        return Closing.NOT_OURS
    if last.id != EntryId(entry_id.attempt, entry_id.seq - 1):
        return Closing.BEHIND
    return None


def _event_for(record: JobRecord, event: End | Released) -> End | Released | None:
    """Return the event that RQ's record allows; None when the job is not ours any more."""
    if record.status == JobStatus.STARTED:
        return event if record.is_executing else None
    if record.status in (JobStatus.QUEUED, JobStatus.FAILED):
        # Somebody took it for abandoned; whoever claims it next goes on with it. A failure of
        # ours would have an end in the stream, so this one is RQ's, and maintenance undoes it.
        return None
    # Cancelled, stopped or deleted behind our back, and nobody has begun it again.
    return Cancelled(metadata={} if isinstance(event, Released) else event.metadata)
