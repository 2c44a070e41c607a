"""`headwater bulk`: run a file of rows, from file to file, and go on after any interruption."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from . import bulk_options as options_of
from .option_groups import GroupedCommand
from .options import JsonOption, print_json

if TYPE_CHECKING:  # the help must not pay for importing redis
    from ..bulk.order import BulkOrder

_INTERRUPTED = 130
_HAS_ERRORS = 3


def register(app: typer.Typer) -> None:
    """Add the command."""
    example = "Example: headwater bulk rows.jsonl results.jsonl --model demo"
    short = "Run a file of rows, and go on after any interruption."
    app.command(cls=GroupedCommand, epilog=example, short_help=short)(bulk)


def bulk(
    source: options_of.Input,
    output: options_of.Output = None,
    model: options_of.Model = "demo",
    redis: options_of.RedisUrl = None,
    workers: options_of.Workers = 1,
    max_batch: options_of.MaxBatch = None,
    namespace: options_of.Namespace = "default",
    max_tokens: options_of.MaxTokens = None,
    temperature: options_of.Temperature = None,
    top_p: options_of.TopP = None,
    seed: options_of.Seed = None,
    stop: options_of.Stop = None,
    priority: options_of.Priority = "low",
    override_model: options_of.OverrideModel = False,
    errors: options_of.Errors = None,
    ordered: options_of.Ordered = False,
    dry_run: options_of.DryRun = False,
    force: options_of.Force = False,
    window: options_of.Window = 1024,
    outstanding: options_of.Outstanding = 256,
    max_queue_depth: options_of.MaxQueueDepth = None,
    tokenizer_processes: options_of.TokenizerProcesses = 0,
    max_row_mb: options_of.MaxRowMb = 16,
    json: JsonOption = False,
) -> None:
    """Run every row of INPUT; the results go to OUTPUT, failures to a file next to it.

    A row is OpenAI's for batches (custom_id, method, url, body), or an object with one of prompt,
    messages and prompt_token_ids, and a job's other fields. Killed at any moment, the same
    command goes on. Ends with 0 when all rows succeeded, 3 when some failed, 130 when interrupted.
    """
    from ..bulk.order import BulkOrder, order_rows
    from ..bulk.run import Limits

    given = {"max_tokens": max_tokens, "temperature": temperature, "top_p": top_p, "stop": stop}
    if output is None and not dry_run:
        raise typer.BadParameter("give OUTPUT, or --dry-run")
    if redis is not None and (workers > 1 or max_batch is not None):
        raise typer.BadParameter("--workers and --max-batch are for workers of its own")
    target = output or Path("-")
    order = BulkOrder(
        source=None if source == "-" else Path(source),
        output=target,
        errors=errors or target.with_name(f"{target.name}.errors.jsonl"),
        model=model,
        redis=redis,
        rows=order_rows(
            model,
            redis,
            override_model=override_model,
            defaults={name: value for name, value in given.items() if value is not None},
            seed=seed,
            namespace=namespace,
            priority=priority,
        ),
        ordered=ordered,
        limits=Limits(
            window, outstanding, max_queue_depth, max_row_mb * 2**20, tokenizer_processes
        ),
        num_workers=workers,
        max_batch=max_batch,
        force=force,
    )
    sys.exit(_dry_run(order, json=json) if dry_run else _carry_out(order, json=json))


def _carry_out(order: "BulkOrder", *, json: bool) -> int:
    from ..bulk.order import carry_out
    from ..bulk.progress import display

    try:
        outcome = carry_out(order, display())
    except KeyboardInterrupt:
        typer.echo("headwater bulk: interrupted; the same command goes on", err=True)
        return _INTERRUPTED
    _print(outcome.tally.summary(), json=json)
    if not outcome.is_complete:
        typer.echo("headwater bulk: stopped; the same command goes on", err=True)
        return _INTERRUPTED
    if outcome.tally.errors:
        typer.echo(f"headwater bulk: see {order.errors}", err=True)
        return _HAS_ERRORS
    return 0


def _dry_run(order: "BulkOrder", *, json: bool) -> int:
    from ..bulk.order import dry_run

    count = dry_run(order, sys.stderr)
    _print(count._asdict(), json=json)
    return _HAS_ERRORS if count.refused else 0


def _print(values: dict[str, Any], *, json: bool) -> None:
    if json:
        print_json(values)
        return
    for name, value in values.items():
        typer.echo(f"{name.replace('_', ' ')}: {'-' if value is None else value}")
