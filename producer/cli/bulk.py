"""`headwater bulk`: run a file of rows, from file to file, and go on after any interruption."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .options import JsonOption, print_json

if TYPE_CHECKING:  # the help must not pay for importing redis
    from ..bulk.order import BulkOrder

_INTERRUPTED = 130
_HAS_ERRORS = 3


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(epilog="Example: headwater bulk rows.jsonl results.jsonl --model demo")(bulk)


def bulk(
    source: Annotated[
        str, typer.Argument(metavar="INPUT", help="Rows, .jsonl or .jsonl.gz; - reads stdin.")
    ],
    output: Annotated[
        Path | None, typer.Argument(metavar="OUTPUT", help="Where results go, a row a line.")
    ] = None,
    model: Annotated[
        str,
        typer.Option(help="Without --redis: directory, hub name, or demo. With it: the alias."),
    ] = "demo",
    redis: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            envvar="HEADWATER_REDIS",
            help="Use the workers there; default: a server and workers of its own.",
        ),
    ] = None,
    errors: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Rows that failed; default: OUTPUT.errors.jsonl."),
    ] = None,
    ordered: Annotated[
        bool, typer.Option("--ordered", help="Write results in the rows' order.")
    ] = False,
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="New tokens, for rows that don't say.")
    ] = None,
    temperature: Annotated[
        float | None, typer.Option(min=0.0, help="For rows that don't say; 0 is greedy.")
    ] = None,
    top_p: Annotated[float | None, typer.Option(help="For rows that don't say.")] = None,
    seed: Annotated[
        int | None, typer.Option(min=0, help="Rows without one get this plus their line number.")
    ] = None,
    stop: Annotated[
        list[str] | None, typer.Option(help="For rows that don't say; may be given again.")
    ] = None,
    override_model: Annotated[
        bool, typer.Option("--override-model", help="Ignore which model the rows name.")
    ] = False,
    priority: Annotated[
        str, typer.Option(help="high, normal or low, for rows that don't say.")
    ] = "low",
    namespace: Annotated[str, typer.Option(help="Isolates queue and prefix cache.")] = "default",
    workers: Annotated[
        int, typer.Option(min=1, max=64, help="Own workers, one a device; without --redis.")
    ] = 1,
    max_batch: Annotated[
        int | None, typer.Option(min=1, help="Rows at once in an own worker (32).")
    ] = None,
    window: Annotated[
        int, typer.Option(min=1, help="Rows that are grouped by their common prefixes.")
    ] = 1024,
    outstanding: Annotated[
        int, typer.Option(min=1, max=10_000, help="Jobs submitted and not done, at most.")
    ] = 256,
    max_queue_depth: Annotated[
        int | None, typer.Option(min=1, help="Wait while the queue holds so many jobs.")
    ] = None,
    tokenizer_processes: Annotated[
        int, typer.Option(min=0, help="Processes that tokenize large inputs; 0 chooses.")
    ] = 0,
    max_row_mb: Annotated[int, typer.Option(min=1, help="Size limit of a row.")] = 16,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check and count the rows; generate nothing.")
    ] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Begin anew, whatever an earlier run left.")
    ] = False,
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
        typer.echo(f"{name.replace('_', ' ')}: {value}")
