"""`headwater soak`: jobs under random faults, then a verdict on every character."""

import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated

import typer

from .options import JsonOption, print_json

if TYPE_CHECKING:  # the help must not pay for importing redis
    from ..soak import Verdict

_MAX_SHOWN = 20


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(
        short_help="Kill workers and the server under load, judge every stream.",
        epilog="Example: headwater soak --minutes 5 --workers 2 --kill-every 5",
    )(soak)


def soak(
    minutes: Annotated[float, typer.Option(min=0.05, help="How long faults happen.")] = 5.0,
    workers: Annotated[int, typer.Option(min=1, max=64, help="Worker processes.")] = 2,
    kill_every: Annotated[float, typer.Option(min=0.5, help="Seconds between kills.")] = 5.0,
    redis_restart_every: Annotated[
        float, typer.Option(min=2.0, help="Seconds between kills of the server.")
    ] = 20.0,
    seed: Annotated[int, typer.Option(help="Of the jobs and of whom the faults hit.")] = 0,
    lease_s: Annotated[float, typer.Option(min=0.5, help="The workers' lease.")] = 1.5,
    undisturbed_s: Annotated[
        float, typer.Option(min=1.0, help="Seconds without faults before, to compare with.")
    ] = 20.0,
    model: Annotated[
        str | None, typer.Option(help="Directory, hub name, or demo; default: a tiny random one.")
    ] = None,
    json: JsonOption = False,
) -> None:
    """Kill workers and the server under load, then check that nothing was lost or doubled.

    Uses processes and a server of its own. Ends with code 1 unless the verdict is good.
    """
    from ..soak import SoakSettings, run_soak

    settings = SoakSettings(
        minutes, workers, kill_every, redis_restart_every, seed, lease_s, undisturbed_s
    )
    with TemporaryDirectory(prefix="headwater-soak-") as directory:
        logs = Path(directory)
        chosen = model or _write_model(logs)
        verdict = run_soak(settings, chosen, logs, lambda line: typer.echo(line, err=True))
    for line in verdict.complaints[:_MAX_SHOWN]:
        typer.echo(line, err=True)
    if json:
        values = verdict._asdict()
        del values["complaints"]
        print_json(values)
    else:
        _print_table(verdict)
    sys.exit(0 if verdict.is_good else 1)


def _write_model(directory: Path) -> str:
    from headwater.worker.engine import blas

    blas.preload()
    # Only now: it brings MLX, which must find the BLAS in place.
    from headwater.worker.engine.random_model import write_random_model

    return str(write_random_model(directory))


def _print_table(verdict: "Verdict") -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title="good" if verdict.is_good else "NOT good", show_header=False)
    for name, value in verdict._asdict().items():
        if name != "complaints":
            shown = f"{value:.1f}" if isinstance(value, float) else str(value)
            table.add_row(name.replace("_", " "), shown)
    Console().print(table)
