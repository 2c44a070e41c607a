"""`headwater api`: the HTTP server, and the keys of its callers."""

from pathlib import Path
from typing import Annotated, Any

import typer

from .options import JsonOption, RedisOption, print_json


def register(app: typer.Typer) -> None:
    """Add the command group; without a subcommand it serves."""
    group = typer.Typer(invoke_without_command=True, rich_markup_mode=None)
    group.callback()(api)
    group.command("new-key", epilog="Example: headwater api new-key alice >> keys.jsonl")(new_key)
    app.add_typer(
        group,
        name="api",
        short_help="Serve OpenAI's protocol over HTTP.",
        epilog="Example: headwater api --keys-file keys.jsonl",
    )


def _flag(name: str, text: str) -> Any:
    return typer.Option(name, help=text, show_default=False)


def api(
    context: typer.Context,
    redis: RedisOption = None,
    host: Annotated[str | None, _flag("--host", "Address to listen on (127.0.0.1).")] = None,
    port: Annotated[int | None, _flag("--port", "Port to listen on (8000).")] = None,
    keys_file: Annotated[
        Path | None, _flag("--keys-file", "API keys; default: anyone may call.")
    ] = None,
    data_dir: Annotated[
        Path | None, _flag("--data-dir", "Where files and batches are kept.")
    ] = None,
    max_queue_depth: Annotated[
        int | None, _flag("--max-queue-depth", "Jobs that may wait in one queue.")
    ] = None,
    log_level: Annotated[
        str | None, _flag("--log-level", "debug, info (default), warning or error.")
    ] = None,
) -> None:
    """Serve OpenAI's routes, and our own, over the queue until SIGTERM or Ctrl-C.

    Every option can be set as HEADWATER_API_<NAME> too. Without --redis it uses this user's
    running embedded server.
    """
    given = {
        name: value
        for name, value in locals().items()
        if value is not None and name not in ("context", "redis")
    }
    if context.invoked_subcommand is not None:
        return
    from headwater.worker.log import configure

    from ..api.server import build_server
    from ..connection import resolve_url

    settings = _settings(given)
    configure(settings.log_level, json=settings.log_json)
    build_server(resolve_url(redis), settings).run()


def new_key(
    name: Annotated[str, typer.Argument(help="Who gets it; stands in the log.")],
    namespace: Annotated[
        str | None, _flag("--namespace", "Where the caller's jobs live (default).")
    ] = None,
    priority: Annotated[
        str | None, _flag("--priority", "high, normal (default) or low: the caller's highest.")
    ] = None,
    requests_per_minute: Annotated[int | None, _flag("--requests-per-minute", "Limit.")] = None,
    max_queued: Annotated[
        int | None, _flag("--max-queued", "Jobs of the caller that may wait.")
    ] = None,
    json: JsonOption = False,
) -> None:
    """Make an API key: the key itself goes to standard error, its line for the file to output.

    The key is shown once; the file holds only its hash.
    """
    from ..api.api_keys import new_key as make

    limits = {"requests_per_minute": requests_per_minute, "max_queued": max_queued}
    key, line = make(name, namespace=namespace, priority=priority, **limits)
    if json:
        print_json({"key": key, "line": line})
    else:
        typer.echo(f"key (shown once): {key}", err=True)
        typer.echo(line)


def _settings(given: dict[str, Any]) -> Any:
    from headwater.schemas.base import describe
    from pydantic import ValidationError

    from ..api.settings import ApiSettings
    from ..errors import InvalidRequest

    try:
        return ApiSettings(**given)
    except ValidationError as error:
        raise InvalidRequest(describe(error)) from error
