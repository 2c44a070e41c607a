"""Options and output that several commands share."""

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
