"""`headwater worker`: the process that owns a model and runs a queue's jobs."""

import os
import re
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from headwater.schemas.errors import HeadwaterError

from .options import RedisOption


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(epilog="Example: headwater worker --model demo --redis redis://localhost:6379/0")(
        worker
    )


def _flag(name: str, text: str) -> Any:
    return typer.Option(name, help=text, show_default=False)


def worker(
    model: Annotated[
        str, typer.Option(envvar="HEADWATER_MODEL", help="Directory, hub name, or demo.")
    ] = "demo",
    redis: RedisOption = None,
    alias: Annotated[
        str | None,
        typer.Option(
            "--alias",
            envvar="HEADWATER_ALIAS",
            help="The name that jobs ask for; default: the model's own name.",
        ),
    ] = None,
    adapters: Annotated[
        list[str] | None,
        _flag("--adapter", "A LoRA adapter, ALIAS=DIRECTORY; may be given again."),
    ] = None,
    max_batch: Annotated[int | None, _flag("--max-batch", "Sequences at once (32).")] = None,
    target_itl_ms: Annotated[
        float | None,
        _flag("--target-itl-ms", "A running sequence waits at most about this long (400)."),
    ] = None,
    prefill_chunk: Annotated[
        int | None, _flag("--prefill-chunk", "Fixed prefill chunk in tokens; default: adaptive.")
    ] = None,
    kv_budget_mb: Annotated[
        int | None, _flag("--kv-budget-mb", "Running KV and prefix cache together, in MiB.")
    ] = None,
    kv_bits: Annotated[
        int | None,
        _flag("--kv-bits", "8 or 4 bits a stored key or value, rows one at a time; default: off."),
    ] = None,
    cache_dir: Annotated[
        Path | None,
        _flag("--cache-dir", "Directory of prefixes that survive restarts; default: none."),
    ] = None,
    cpu_threads: Annotated[
        int | None, _flag("--cpu-threads", "Threads of the BLAS on a CPU; default: all cores.")
    ] = None,
    reasoning: Annotated[
        str | None, _flag("--reasoning", "Markers of the reasoning; default: the model's own.")
    ] = None,
    tool_parser: Annotated[
        str | None, _flag("--tool-parser", "Form of the tool calls; default: the model's own.")
    ] = None,
    lease_s: Annotated[
        float | None, _flag("--lease-s", "Seconds of silence after which jobs are lost (15).")
    ] = None,
    drain_s: Annotated[
        float | None, _flag("--drain-s", "Seconds that SIGTERM waits for running jobs (30).")
    ] = None,
    metrics_port: Annotated[
        int | None, _flag("--metrics-port", "Port of /metrics, /healthz, /readyz; default: off.")
    ] = None,
    log_level: Annotated[
        str | None, _flag("--log-level", "debug, info (default), warning or error.")
    ] = None,
) -> None:
    """Load a model and run its jobs until SIGTERM or Ctrl-C; a second one hands jobs back at once.

    Every option can be set as HEADWATER_<NAME> too. Without --redis it uses this user's running
    embedded server, or starts one that lives as long as the worker.
    """
    given = {name: value for name, value in locals().items() if value not in (None, [])}
    from headwater.worker.entry import run

    from ..connection import check_url
    from ..embedded import running_or_own

    given.setdefault("alias", _alias_of(model))
    try:
        with running_or_own() if redis is None else nullcontext(redis) as url:
            check_url(url)
            code = run(**(given | {"redis": url}))
    except HeadwaterError as error:
        typer.echo(f"headwater: {error}", err=True)
        code = 1
    _leave(code)


def _leave(code: int) -> NoReturn:
    """End the process at once: all is closed by now.

    The interpreter's own exit now and then aborts ("terminate called") in MLX's destructors
    once MLX has run on another thread, and a supervisor would take that for a crash.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _alias_of(model: str) -> str:
    """Return a name for jobs to ask for, made of the model's own."""
    return re.sub(r"[^A-Za-z0-9_-]+", "-", Path(model).name).strip("-")[:64]
