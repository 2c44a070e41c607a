"""`headwater status`: queues and workers at a glance, or as they change."""

import sys
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from .options import JsonOption, RedisOption, print_json

if TYPE_CHECKING:  # the help must not pay for importing redis
    from redis import Redis

_PIPE_WIDTH = 200


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(
        short_help="Queues, workers and last ends at a glance.",
        epilog="Example: headwater status --watch --interval 5",
    )(status)


def status(
    redis: RedisOption = None,
    json: JsonOption = False,
    watch: Annotated[
        bool,
        typer.Option(
            "--watch",
            help="Keep showing it until Ctrl-C: drawn anew on a terminal, a line a look elsewhere.",
        ),
    ] = False,
    interval: Annotated[
        float, typer.Option(min=0.1, metavar="SECONDS", help="Between two looks of --watch.")
    ] = 2.0,
) -> None:
    """Show queues, workers with batch and speed, and the jobs that ended last."""
    from ..connection import connect, look
    from ..overview import read_overview

    if watch:
        _watch(connect(redis), interval, as_json=json)
    elif json:
        print_json(look(redis, read_overview).as_json())
    else:
        from rich.console import Console

        from ..overview_text import as_tables

        # Off a terminal rich assumes 80 columns and would cut what a script wants to read.
        console = Console(width=None if sys.stdout.isatty() else _PIPE_WIDTH)
        console.print(as_tables(look(redis, read_overview)))


def _watch(client: "Redis", interval: float, *, as_json: bool) -> None:
    import time

    from rich.live import Live

    from ..overview import read_overview
    from ..watch import JsonView, LineView, LiveView, watch

    run = partial(watch, partial(read_overview, client), pause=partial(time.sleep, interval))
    if as_json:
        run(JsonView(typer.echo))
    elif not sys.stdout.isatty():
        run(LineView(typer.echo))
    else:
        with Live(auto_refresh=False) as live:
            run(LiveView(live))
