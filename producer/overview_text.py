"""An Overview for people: as tables, and as one line."""

import time
from collections.abc import Iterable, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from .overview import EndedJob, Overview
from .status import LiveWorker, QueueStatus

_QUEUES = ("queue", "waiting", "oldest", "started", "finished", "failed", "canceled")
_WORKERS = ("worker", "model", "batch", "waiting", "tokens/s", "cache hits", "heartbeat")
_ENDED = ("ended job", "model", "end", "prompt", "cached", "new", "took", "why")


def as_tables(overview: Overview) -> RenderableType:
    """Return queues, workers, and the jobs that ended last."""
    status = overview.status
    parts: list[RenderableType] = [
        _table(_QUEUES, map(_queue_row, status.queues)) if status.queues else "no queues",
        _table(_WORKERS, map(_worker_row, status.workers)) if status.workers else "no workers",
    ]
    if overview.ended:
        parts.append(_table(_ENDED, map(_ended_row, overview.ended)))
    return Group(*parts)


def as_line(overview: Overview) -> str:
    """Return the figures over all queues and workers, for a log or a headline."""
    totals = overview.totals
    workers = "1 worker" if totals.workers == 1 else f"{totals.workers} workers"
    return (
        f"{clock(overview.status.at_s)} {totals.waiting} waiting,"
        f" {totals.running} running on {workers}, {totals.tokens_per_s:.1f} tokens/s,"
        f" {totals.cache_hit_share:.0%} of prompt tokens reused;"
        f" {totals.finished} finished, {totals.failed} failed, {totals.canceled} canceled"
    )


def clock(unix_s: float) -> str:
    """Return the local time of day."""
    return time.strftime("%H:%M:%S", time.localtime(unix_s))


def _table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    table = Table(*titles)
    for row in rows:
        table.add_row(*map(_cell, row))
    return table


def _cell(text: str) -> Text:
    # Names come from Redis: neither markup nor a terminal's escape sequences.
    return Text(
        "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in text)
    )


def _queue_row(queue: QueueStatus) -> list[str]:
    oldest = "-" if queue.oldest_age_s is None else f"{queue.oldest_age_s:.0f} s"
    counts = (queue.started, queue.finished, queue.failed, queue.canceled)
    return [queue.name, str(queue.depth), oldest, *map(str, counts)]


def _worker_row(worker: LiveWorker) -> list[str]:
    status = worker.status
    return [
        status.worker_id,
        status.alias + (" (draining)" if status.draining else ""),
        str(status.batch),
        str(status.waiting),
        f"{status.tokens_per_s:.1f}",
        f"{status.cache_hit_share:.0%}",
        f"{worker.heartbeat_age_s:.1f} s ago",
    ]


def _ended_row(job: EndedJob) -> list[str]:
    counts = (job.prompt_tokens, job.cached_tokens, job.completion_tokens)
    return [
        job.job_id,
        job.model,
        job.status,
        *("" if count is None else str(count) for count in counts),
        "" if job.total_ms is None else f"{job.total_ms / 1000:.2f} s",
        job.message or "",
    ]
