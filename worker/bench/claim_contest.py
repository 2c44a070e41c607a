"""What a claim costs where the queue has a given depth, on a real server."""

import statistics
import time

from headwater.schemas import keys
from redis import Redis

from ..booking.rq_jobs import RQBook, job_keys
from ..intake.claimer import Claimer
from ..intake.settings import IntakeSettings
from ..messages import Claim
from ..redis_client import connect
from .report import Figures
from .scenario import BenchError, OpenQueue
from .workload import ALIAS, make_job

_IDS_PER_PUSH = 10_000


def measure_claims(open_queue: OpenQueue, num_claims: int, depth: int) -> Figures:
    """Claim *num_claims* jobs, one at a time, each the first of a queue of *depth* ids.

    The ids behind it name no jobs: a claim must not look at them. Raises BenchError where a
    claim gets another job than the first.
    """
    jobs = [make_job(f"claim-{index}", (1, 2, 3), 1) for index in range(num_claims)]
    queue_name = keys.job_queue_name(jobs[0])
    seconds = []
    with open_queue() as queue:
        queue.submit(jobs)
        redis = connect(queue.url)
        claimer = _claimer(redis)
        key = job_keys("", queue_name).queue
        _fill(redis, key, depth - 1)
        for job in jobs:
            num_waiting = redis.lpush(key, job.job_id)
            claims: list[Claim] = []
            started = time.perf_counter()
            claimer.claim(queue_name, claims.append)
            seconds.append(time.perf_counter() - started)
            if [claim.job_id for claim in claims] != [job.job_id]:
                raise BenchError(f"{job.job_id} was not claimed, but {claims}")
        redis.close()
    return {"claim_p50_ms": statistics.median(seconds) * 1e3, "queue_depth": float(num_waiting)}


def _claimer(redis: Redis) -> Claimer:
    settings = IntakeSettings(worker_id="bench", model=ALIAS, sampler_version=1, max_claims=1)
    book = RQBook(redis, lease_s=settings.lease_s, retention_s=settings.retention_s)
    return Claimer(redis, book, settings, is_held=lambda _: False)


def _fill(redis: Redis, key: str, num_ids: int) -> None:
    """Make a queue of *num_ids* ids and nothing else."""
    redis.delete(key)
    for first in range(0, num_ids, _IDS_PER_PUSH):
        last = min(first + _IDS_PER_PUSH, num_ids)
        redis.rpush(key, *(f"waiting-{index}" for index in range(first, last)))
