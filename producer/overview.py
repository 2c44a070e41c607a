"""Overview: what `headwater status` shows, read at one moment, as plain data."""

from typing import Any, NamedTuple

from headwater.schemas import Failed, Finished
from redis import Redis

from .job_view import JobView, ended_job_ids, read_jobs
from .status import QueueStatus, Status, read_status

NUM_ENDS = 8
"""Jobs that are shown of those that ended."""


class EndedJob(NamedTuple):
    """What is shown of a job that has ended: figures, never its text."""

    job_id: str
    model: str
    status: str
    """finished, failed, cancelled or expired; `ended` where the stream that said how is gone."""
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    completion_tokens: int | None = None
    total_ms: float | None = None
    message: str | None = None
    """Why it failed."""


class Totals(NamedTuple):
    """Figures over all queues and workers."""

    waiting: int
    workers: int
    running: int
    """Sequences in the workers' batches."""
    tokens_per_s: float
    cache_hit_share: float
    """Mean of the workers'."""
    finished: int
    failed: int
    canceled: int


class Overview(NamedTuple):
    """The present state."""

    status: Status
    ended: list[EndedJob]
    """The newest first."""

    @property
    def totals(self) -> Totals:
        """Figures over all queues and workers."""
        queues, workers = self.status.queues, [worker.status for worker in self.status.workers]
        return Totals(
            waiting=sum(queue.depth for queue in queues),
            workers=len(workers),
            running=sum(worker.batch for worker in workers),
            tokens_per_s=sum(worker.tokens_per_s for worker in workers),
            cache_hit_share=sum(w.cache_hit_share for w in workers) / max(1, len(workers)),
            **_counts(queues),
        )

    def as_json(self) -> dict[str, Any]:
        """Return it as JSON values."""
        workers = [
            worker.status.model_dump(mode="json")
            | {"heartbeat_age_s": worker.heartbeat_age_s, "lease_left_s": worker.lease_left_s}
            for worker in self.status.workers
        ]
        return {
            "at": self.status.at_s,
            "totals": self.totals._asdict(),
            "queues": [queue._asdict() for queue in self.status.queues],
            "workers": workers,
            "ended": [job._asdict() for job in self.ended],
        }


def read_overview(redis: Redis) -> Overview:
    """Return the present state; changes nothing. Raises RedisError."""
    status = read_status(redis)
    ids = ended_job_ids(redis, [queue.name for queue in status.queues], NUM_ENDS)
    views = read_jobs(redis, ids)
    return Overview(status, [_ended(view) for view in views if view is not None])


def _counts(queues: list[QueueStatus]) -> dict[str, int]:
    names = ("finished", "failed", "canceled")
    return {name: sum(getattr(queue, name) for queue in queues) for name in names}


def _ended(view: JobView) -> EndedJob:
    job = EndedJob(view.job_id, view.model, view.status)
    if isinstance(view.end, Failed):
        return job._replace(message=view.end.message)
    if isinstance(view.end, Finished):
        usage = view.end.usage
        return job._replace(
            prompt_tokens=usage.prompt_tokens,
            cached_tokens=usage.cached_tokens,
            completion_tokens=usage.completion_tokens,
            total_ms=view.end.timings.total_ms,
        )
    return job
