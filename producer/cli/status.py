"""`headwater status`: queues and workers at a glance."""

import sys
from typing import TYPE_CHECKING

import typer

from .options import JsonOption, RedisOption, print_json

if TYPE_CHECKING:  # the help must not pay for importing redis
    from ..status import LiveWorker, QueueStatus, Status

_PIPE_WIDTH = 200


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(epilog="Example: headwater status --json")(status)


def status(redis: RedisOption = None, json: JsonOption = False) -> None:
    """Show queues with depth and oldest age, and workers with model, batch and speed."""
    from ..connection import connect
    from ..status import read_status

    found = read_status(connect(redis))
    if json:
        print_json(_as_json(found))
    else:
        _print_tables(found)


def _as_json(found: "Status") -> dict[str, object]:
    workers = [
        worker.status.model_dump(mode="json")
        | {"heartbeat_age_s": worker.heartbeat_age_s, "lease_left_s": worker.lease_left_s}
        for worker in found.workers
    ]
    return {"queues": [queue._asdict() for queue in found.queues], "workers": workers}


def _print_tables(found: "Status") -> None:
    from rich.console import Console
    from rich.table import Table

    # Off a terminal rich assumes 80 columns and would cut what a script wants to read.
    console = Console(width=None if sys.stdout.isatty() else _PIPE_WIDTH)
    queues = Table("queue", "waiting", "oldest", "started", "finished", "failed", "canceled")
    for queue in found.queues:
        queues.add_row(*_queue_row(queue))
    workers = Table("worker", "model", "batch", "waiting", "tokens/s", "cache hits", "heartbeat")
    for worker in found.workers:
        workers.add_row(*_worker_row(worker))
    console.print(queues if found.queues else "no queues")
    console.print(workers if found.workers else "no workers")


def _queue_row(queue: "QueueStatus") -> list[str]:
    oldest = "-" if queue.oldest_age_s is None else f"{queue.oldest_age_s:.0f} s"
    counts = (queue.started, queue.finished, queue.failed, queue.canceled)
    return [queue.name, str(queue.depth), oldest, *map(str, counts)]


def _worker_row(worker: "LiveWorker") -> list[str]:
    status = worker.status
    return [
        status.worker_id,
        status.alias,
        str(status.batch),
        str(status.waiting),
        f"{status.tokens_per_s:.1f}",
        f"{status.cache_hit_share:.0%}",
        f"{worker.heartbeat_age_s:.1f} s ago",
    ]
