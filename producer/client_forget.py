"""Forgetting ended jobs: their keys go before they would expire."""

from collections.abc import Iterable
from typing import Any

from headwater.schemas import keys
from redis import Redis

from .client_queue import job_key, queue_keys


def forget_jobs(redis: Redis, jobs: Iterable[tuple[str, str]]) -> None:
    """Delete all that the server holds of jobs that have *ended*: (job id, queue name) each.

    For whoever has their results in a safe place. A job that has not ended would be lost.
    """
    pipeline: Any = redis.pipeline(transaction=False)
    for job_id, queue_name in jobs:
        pipeline.unlink(
            job_key(job_id),
            f"rq:results:{job_id}",
            keys.stream_key(job_id),
            keys.attempt_key(job_id),
            keys.cancel_key(job_id),
        )
        registries = queue_keys(queue_name)
        for registry in (registries.finished, registries.failed, registries.canceled):
            pipeline.zrem(registry, job_id)
    pipeline.execute()
