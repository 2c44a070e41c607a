"""`headwater worker`: the process that owns a model and runs a queue's jobs."""

import os
import re
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import NoReturn

import typer
from headwater.schemas.errors import HeadwaterError

from . import worker_options as options_of
from .option_groups import GroupedCommand
from .options import RedisOption


def register(app: typer.Typer) -> None:
    """Add the command."""
    example = "Example: headwater worker --model demo --redis redis://localhost:6379/0"
    short = "Load a model and run its jobs until SIGTERM or Ctrl-C."
    app.command(cls=GroupedCommand, epilog=example, short_help=short)(worker)


def worker(
    model: options_of.Model = "demo",
    alias: options_of.Alias = None,
    adapters: options_of.Adapters = None,
    reasoning: options_of.Reasoning = None,
    tool_parser: options_of.ToolParser = None,
    max_batch: options_of.MaxBatch = None,
    target_itl_ms: options_of.TargetItlMs = None,
    prefill_chunk: options_of.PrefillChunk = None,
    kv_budget_mb: options_of.KvBudgetMb = None,
    kv_bits: options_of.KvBits = None,
    cache_dir: options_of.CacheDir = None,
    cpu_threads: options_of.CpuThreads = None,
    lease_s: options_of.LeaseS = None,
    drain_s: options_of.DrainS = None,
    metrics_port: options_of.MetricsPort = None,
    log_level: options_of.LogLevel = None,
    redis: RedisOption = None,
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
