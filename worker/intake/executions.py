"""A queue's executions, and which of them look lost; in three trips, however many there are."""

from collections.abc import Iterable
from typing import Any, NamedTuple

from headwater.schemas import keys
from redis import Redis
from rq.executions import Execution

from ..booking.rq_jobs import RunningJob, job_keys


class Surveyed(NamedTuple):
    """An execution as it looked a moment ago."""

    running: RunningJob
    may_be_lost: bool
    """Its worker has no lease, or its job has an end already, or its keys are broken: to be
    looked at again in a transaction."""


def survey(redis: Redis, queue_name: str) -> list[Surveyed]:
    """Return the executions that RQ lists as started in a queue."""
    members: Any = redis.zrange(job_keys("", queue_name).started, 0, -1)
    composites = [member.decode("utf-8", "replace").partition(":") for member in members]
    names = _replies(
        redis,
        (
            ("HGET", Execution(execution_id, job_id, redis).key, "worker_name")
            for job_id, _, execution_id in composites
        ),
    )
    executions = [
        # An execution whose hash is gone has no worker either.
        RunningJob(job_id, queue_name, execution_id, _text(name) or "-")
        for (job_id, _, execution_id), name in zip(composites, names, strict=True)
    ]
    leases = _replies(redis, (("EXISTS", keys.worker_key(each.worker_id)) for each in executions))
    tips = _replies(
        redis,
        (("XREVRANGE", keys.stream_key(each.job_id), "+", "-", "COUNT", 1) for each in executions),
    )
    return [
        Surveyed(each, lease != 1 or not _is_open(tip))
        for each, lease, tip in zip(executions, leases, tips, strict=True)
    ]


def _replies(redis: Redis, commands: Iterable[tuple[str | int, ...]]) -> list[Any]:
    """Send all; a command's own error stands where its reply would."""
    with redis.pipeline(transaction=False) as pipeline:
        for command in commands:
            pipeline.execute_command(*command)  # type: ignore[no-untyped-call]
        replies: list[Any] = pipeline.execute(raise_on_error=False)
    return replies


def _text(reply: Any) -> str | None:
    return reply.decode("utf-8", "replace") if isinstance(reply, bytes) else None


def _is_open(tip: Any) -> bool:
    """Whether a stream's last entry, as XREVRANGE gives it, is there and no end."""
    return isinstance(tip, list) and bool(tip) and b"end" not in tip[0][1]
