"""CancelWatch: jobs of ours whose end somebody has asked for."""

from collections.abc import Iterable
from typing import Any

from headwater.schemas import keys
from redis import Redis
from rq.job import JobStatus

from ..booking.rq_jobs import job_keys
from ..messages import Claim

_ENDED_BY_OTHERS = {JobStatus.CANCELED.value.encode(), JobStatus.STOPPED.value.encode(), None}
"""RQ's word for a job that was cancelled, stopped or deleted behind our back."""


class CancelWatch:
    """Looks at the durable wishes, and at RQ's own cancel and stop, in one trip."""

    def __init__(self, redis: Redis) -> None:
        self._redis = redis

    def cancelled(self, claims: Iterable[Claim]) -> list[str]:
        """Return the ids of those *claims* that should end now."""
        watched = list(claims)
        if not watched:
            return []
        with self._redis.pipeline(transaction=False) as pipeline:
            pipeline.mget([keys.cancel_key(claim.job_id) for claim in watched])
            for claim in watched:
                pipeline.hget(job_keys(claim.job_id, claim.queue_name).job, "status")
            replies: list[Any] = pipeline.execute()
        wishes, statuses = replies[0], replies[1:]
        return [
            claim.job_id
            for claim, wish, status in zip(watched, wishes, statuses, strict=True)
            if wish is not None or status in _ENDED_BY_OTHERS
        ]
