"""What workers hold of computed prefixes, and the wish that they let go of it."""

import secrets
import time
from collections.abc import Iterable, Iterator
from enum import Enum
from functools import partial
from typing import Any, Final, NamedTuple

from headwater.schemas import (
    CacheClear,
    CacheReport,
    ClearOutcome,
    SchemaError,
    WorkerStatus,
    keys,
)
from redis import Redis

from .patience import insist
from .status import read_workers

_WISH_TTL_S: Final = 600
"""A worker that can't look now finds the wish when it can."""
_POLL_S: Final = 0.1


class WorkerCaches(NamedTuple):
    """A running worker and its caches."""

    worker: WorkerStatus
    report: CacheReport | None
    """None when the worker tells nothing: it is of another version."""


class ClearState(Enum):
    """What came of a wish to clear."""

    CLEARED = "cleared"
    NO_ANSWER = "no_answer"
    """It stays for ten minutes."""
    GONE = "gone"
    """The worker ended; what it had in memory is gone with it."""
    NOT_UNDERSTOOD = "not_understood"
    """The worker is of another version."""


class Cleared(NamedTuple):
    """What came of the wish at one worker."""

    worker: WorkerStatus
    state: ClearState
    outcome: ClearOutcome | None = None
    report: CacheReport | None = None
    """What the worker holds now."""


def read_caches(redis: Redis, model: str | None = None) -> list[WorkerCaches]:
    """Return the running workers' caches, those of *model* only where it is given."""
    found = (live.status for live in read_workers(redis))
    workers = [worker for worker in found if model in (None, worker.alias)]
    return [WorkerCaches(worker, read_report(redis, worker.worker_id)) for worker in workers]


def read_report(redis: Redis, worker_id: str) -> CacheReport | None:
    """Return a worker's last report; None when there is none that we understand."""
    value: Any = redis.get(keys.cache_report_key(worker_id))
    try:
        return None if value is None else CacheReport.decode(value)
    except SchemaError:
        return None


def clear_caches(
    redis: Redis,
    workers: Iterable[WorkerCaches],
    *,
    memory: bool = True,
    disk: bool = True,
    timeout_s: float = 60.0,
) -> Iterator[Cleared]:
    """Ask workers to empty their caches; yield what came of it, worker by worker.

    What running jobs use stays. A worker looks at once, or, if it misses the bell, with its next
    heartbeat.
    """
    wish = CacheClear(clear_id=secrets.token_hex(8), memory=memory, disk=disk)
    asked = list(workers)
    for worker, report in asked:
        if report is not None:
            insist(partial(_ask, redis, worker, wish))
    deadline = time.monotonic() + timeout_s
    for worker, report in asked:
        if report is None:
            yield Cleared(worker, ClearState.NOT_UNDERSTOOD)
        else:
            yield _await(redis, worker, wish, deadline)


def _ask(redis: Redis, worker: WorkerStatus, wish: CacheClear) -> None:
    redis.set(keys.cache_clear_key(worker.worker_id), wish.encode(), ex=_WISH_TTL_S)
    redis.publish(keys.bell_channel(worker.alias), keys.CACHE_BELL)


def _await(redis: Redis, worker: WorkerStatus, wish: CacheClear, deadline: float) -> Cleared:
    while True:
        found = insist(partial(_look, redis, worker, wish))
        if found.state is not ClearState.NO_ANSWER or time.monotonic() >= deadline:
            return found
        time.sleep(_POLL_S)


def _look(redis: Redis, worker: WorkerStatus, wish: CacheClear) -> Cleared:
    """Return what has come of the wish so far."""
    report = read_report(redis, worker.worker_id)
    outcome = report.last_clear if report is not None else None
    if outcome is not None and outcome.clear_id == wish.clear_id:
        redis.delete(keys.cache_clear_key(worker.worker_id))
        return Cleared(worker, ClearState.CLEARED, outcome, report)
    if not redis.exists(keys.worker_key(worker.worker_id)):
        return Cleared(worker, ClearState.GONE)
    return Cleared(worker, ClearState.NO_ANSWER, report=report)
