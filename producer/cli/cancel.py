"""`headwater cancel`: ask for the end of a job."""

from typing import Annotated

import typer

from .options import JsonOption, RedisOption, print_json


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(
        short_help="Cancel a job, queued or running.", epilog="Example: headwater cancel 3f2a9c"
    )(cancel)


def cancel(
    job_id: Annotated[str, typer.Argument(help="As `submit` printed it.")],
    redis: RedisOption = None,
    json: JsonOption = False,
) -> None:
    """Cancel a job: at once while it is queued, within a step while it runs.

    Exits with 5 when there is no such job.
    """
    from ..client import Producer
    from ..client_cancel import CancelOutcome
    from ..connection import connect
    from .following import EXIT_EXPIRED

    outcome = Producer(connect(redis)).cancel(job_id)
    if json:
        print_json({"job_id": job_id, "outcome": outcome.value})
    else:
        typer.echo(f"{job_id}: {outcome.describe()}")
    if outcome is CancelOutcome.UNKNOWN:
        raise typer.Exit(EXIT_EXPIRED)
