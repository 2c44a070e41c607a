"""Options and output that several commands share."""

import sys
from typing import Annotated, Any

import orjson
import typer

RedisOption = Annotated[
    str | None,
    typer.Option(
        "--redis",
        metavar="URL",
        envvar="HEADWATER_REDIS",
        help="redis://, rediss:// or unix:// URL; default: this user's running embedded server.",
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]


def print_json(value: Any) -> None:
    """Write *value* as one line of JSON."""
    typer.echo(orjson.dumps(value).decode())


def log_to_stderr() -> None:
    """Send what the worker's parts log beside a command's answer, never into it."""
    import structlog

    # Asked for at every line: sys.stderr may be another one by then.
    structlog.configure(logger_factory=lambda *_: structlog.PrintLogger(sys.stderr))
