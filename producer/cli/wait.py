"""`headwater wait`: until a worker serves an alias."""

from typing import Annotated

import typer

from .options import RedisOption


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(
        short_help="Return as soon as a worker serves a model.",
        epilog="Example: headwater wait --model demo --timeout 60",
    )(wait)


def wait(
    model: Annotated[str, typer.Option(help="The alias that a worker is to serve.")],
    timeout: Annotated[
        float, typer.Option(min=0, metavar="SECONDS", help="Wait no longer than this.")
    ] = 300.0,
    redis: RedisOption = None,
) -> None:
    """Wait until a worker has loaded its model and takes jobs, as after a start with `&`.

    Prints nothing. Exits with 1 when the time is over, and says what is missing. The server, too,
    may come later.
    """
    from ..readiness import wait_for_worker

    wait_for_worker(redis, model, timeout)
