"""Jobs as an onlooker sees them: where each stands, and which were there lately."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from headwater.schemas import END_TYPES, End, EntryId, SchemaError, StreamEntry, decode_entry, keys
from redis import Redis

from .client_queue import RQ_FIELDS, RQJob, job_key, parse_rq_job, queue_keys


class JobView(NamedTuple):
    """What RQ and the stream's last entry say of a job."""

    job_id: str
    rq_job: RQJob | None
    """None once RQ's record has expired."""
    last: StreamEntry | None
    """None while no worker has begun, and once the stream has expired."""
    enqueued_at: str | None
    """UTC, ISO 8601."""

    @property
    def status(self) -> str:
        """queued, running, or how it ended; `ended` where the stream that said how is gone."""
        if self.end is not None:
            return self.end.type
        return str(self.rq_job.state) if self.rq_job else "running"

    @property
    def end(self) -> End | None:
        """The job's end, if it is in the stream."""
        event = self.last.event if self.last else None
        return event if isinstance(event, END_TYPES) else None

    @property
    def end_id(self) -> EntryId | None:
        """The id of the entry that ends the stream."""
        return self.last.id if self.last and self.last.is_end else None

    @property
    def model(self) -> str:
        """The alias that it was submitted for."""
        return self.rq_job.queue_name.split(".")[0] if self.rq_job else ""

    @property
    def namespace(self) -> str | None:
        """The namespace that it belongs to, as long as RQ knows it."""
        return self.rq_job.queue_name.rpartition(".")[2] if self.rq_job else None


def read_jobs(redis: Redis, job_ids: Sequence[str]) -> list[JobView | None]:
    """Return each job's view; None for one that neither RQ nor a stream knows."""
    pipeline: Any = redis.pipeline(transaction=False)
    for job_id in job_ids:
        pipeline.hmget(job_key(job_id), *RQ_FIELDS, "enqueued_at")
        pipeline.xrevrange(keys.stream_key(job_id), count=1)
    replies = pipeline.execute()
    return [
        _view(job_id, fields, entries)
        for job_id, fields, entries in zip(job_ids, replies[::2], replies[1::2], strict=True)
    ]


def recent_job_ids(redis: Redis, queue_names: Sequence[str], limit: int) -> list[str]:
    """Return the ids of jobs that run, then of those that ended last, at most *limit*."""
    pipeline: Any = redis.pipeline(transaction=False)
    for name in queue_names:
        pipeline.zrevrange(queue_keys(name).started, 0, limit - 1)
    # Members are <job id>:<execution id>.
    running = [
        member.decode().partition(":")[0] for started in pipeline.execute() for member in started
    ]
    ended = ended_job_ids(redis, queue_names, limit)
    return list(dict.fromkeys(running + ended))[:limit]


def ended_job_ids(redis: Redis, queue_names: Iterable[str], limit: int) -> list[str]:
    """Return the ids of the jobs that ended last, the newest first, at most *limit*."""
    pipeline: Any = redis.pipeline(transaction=False)
    for names in map(queue_keys, queue_names):
        for registry in (names.finished, names.failed, names.canceled):
            # Scores are expiry times, all after the same retention.
            pipeline.zrevrange(registry, 0, limit - 1, withscores=True)
    ended = [(score, member.decode()) for found in pipeline.execute() for member, score in found]
    return [job_id for _, job_id in sorted(ended, reverse=True)][:limit]


def _view(job_id: str, fields: list[bytes | None], entries: list[Any]) -> JobView | None:
    rq_job = parse_rq_job(fields[: len(RQ_FIELDS)])
    if rq_job is None and not entries:
        return None
    enqueued_at = fields[-1]
    return JobView(
        job_id,
        rq_job,
        _decode(entries),
        enqueued_at.decode("ascii", "replace") if enqueued_at else None,
    )


def _decode(entries: list[Any]) -> StreamEntry | None:
    try:
        return decode_entry(*entries[0]) if entries else None
    except SchemaError:
        return None  # an onlooker can do nothing about a damaged entry; a reader raises
