"""`headwater tail`: print a job's text as it comes."""

from typing import Annotated

import typer

from .options import JsonOption, RedisOption


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(epilog="Example: headwater tail 3f2a9c --after 1-4 --json")(tail)


def tail(
    job_id: Annotated[str, typer.Argument(help="As `submit` printed it.")],
    after: Annotated[
        str | None, typer.Option(metavar="ID", help="Resume after this entry (its `id`).")
    ] = None,
    redis: RedisOption = None,
    json: JsonOption = False,
) -> None:
    """Print a job's text as it comes, or with --json one event per line.

    Exit code: 0 finished, 3 failed, 4 cancelled, 5 expired or unknown.
    """
    from headwater.schemas import EntryId

    from ..connection import connect
    from ..tail import tail as read
    from .following import follow

    resume_after = EntryId.parse(after) if after is not None else None
    follow(read(connect(redis), job_id, resume_after), as_json=json)
