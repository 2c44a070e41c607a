"""`headwater cache`: what workers and directories hold of computed prefixes; empty them."""

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .options import JsonOption, RedisOption, print_json

if TYPE_CHECKING:  # the help must not pay for importing redis
    from headwater.worker.disk_tier.inventory import ModelInventory

    from ..caches import Cleared, WorkerCaches

_PIPE_WIDTH = 200
_MIB = 2**20

_ModelOption = Annotated[
    str | None, typer.Option("--model", help="Only workers that serve this alias.")
]
_DirectoryOption = Annotated[
    Path | None,
    typer.Option("--cache-dir", help="A directory of prefixes; no worker and no server is asked."),
]


def register(app: typer.Typer) -> None:
    """Add the command group."""
    group = typer.Typer(rich_markup_mode=None, invoke_without_command=True)
    group.callback()(show)
    group.command("clear", epilog="Example: headwater cache clear --disk")(clear)
    app.add_typer(
        group,
        name="cache",
        short_help="What workers hold of computed prefixes; clear it.",
        help="Show what workers hold of computed prefixes: sizes, hits, what saved most.\n\n"
        "Prefixes appear as lengths and hashes, never as text.\n\nExample: headwater cache --json",
    )


def show(
    context: typer.Context,
    redis: RedisOption = None,
    model: _ModelOption = None,
    cache_dir: _DirectoryOption = None,
    json: JsonOption = False,
) -> None:
    """Show what is held."""
    if context.invoked_subcommand is not None:
        return
    if cache_dir is not None:
        _show_directory(cache_dir, json=json)
        return
    from ..caches import read_caches
    from ..connection import look

    found = look(redis, lambda client: read_caches(client, model))
    if json:
        print_json({"workers": [_worker_json(each) for each in found]})
    else:
        _print_workers(found)


def clear(
    redis: RedisOption = None,
    model: _ModelOption = None,
    memory: Annotated[bool, typer.Option("--memory", help="Only what is in memory.")] = False,
    disk: Annotated[bool, typer.Option("--disk", help="Only what is on disk.")] = False,
    cache_dir: _DirectoryOption = None,
    timeout_s: Annotated[float, typer.Option(help="Wait so long for the workers.")] = 60.0,
    json: JsonOption = False,
) -> None:
    """Empty the caches of running workers, memory and disk; what running jobs use stays.

    Exits with 1 unless every worker has done it.
    """
    if cache_dir is not None:
        _clear_directory(cache_dir, json=json)
        return
    from ..caches import ClearState, clear_caches, read_caches
    from ..connection import connect
    from ..errors import UnknownModel
    from ..patience import insist

    client = connect(redis)
    workers = insist(lambda: read_caches(client, model))
    if not workers:
        serving = f" serves {model!r}" if model else " is running"
        raise UnknownModel(f"no worker{serving}; --cache-dir DIR empties a directory without one")
    both = memory == disk
    cleared = []
    for each in clear_caches(
        client, workers, memory=memory or both, disk=disk or both, timeout_s=timeout_s
    ):
        cleared.append(each)
        if not json:
            typer.echo(f"{each.worker.worker_id}: {_describe(each, timeout_s)}")
    if json:
        print_json({"workers": [_cleared_json(each) for each in cleared]})
    if any(each.state is not ClearState.CLEARED for each in cleared):
        raise typer.Exit(1)


def _show_directory(directory: Path, *, json: bool) -> None:
    from headwater.worker.disk_tier import take_inventory

    found = take_inventory(_existing(directory))
    if json:
        print_json({"directory": str(directory), "models": [each.as_json() for each in found]})
        return
    _print_table(
        ("model", "entries", "tokens", "size", "fingerprint"),
        ((each.folder, *_counts(each), each.fingerprint or "unreadable") for each in found),
        f"no prefixes in {directory}",
    )


def _clear_directory(directory: Path, *, json: bool) -> None:
    from headwater.worker.disk_tier import clear_directory

    num_bytes = clear_directory(_existing(directory))
    if json:
        print_json({"directory": str(directory), "removed_nbytes": num_bytes})
    else:
        typer.echo(f"removed {_size(num_bytes)} from {directory}")


def _existing(directory: Path) -> Path:
    from ..errors import InvalidRequest

    if not directory.is_dir():
        raise InvalidRequest(f"no directory {str(directory)!r}; give what --cache-dir names")
    return directory


def _worker_json(each: "WorkerCaches") -> dict[str, Any]:
    shown: dict[str, Any] = {"worker_id": each.worker.worker_id, "alias": each.worker.alias}
    if each.report is None:
        return shown | {"report": None}
    report = each.report.model_dump(mode="json") | {"hit_share": each.report.hit_share}
    return shown | {"report": report}


def _cleared_json(each: "Cleared") -> dict[str, Any]:
    outcome = each.outcome.model_dump(exclude={"clear_id"}) if each.outcome else {}
    identity = {"worker_id": each.worker.worker_id, "alias": each.worker.alias}
    return {**identity, "state": each.state.value, **outcome}


def _describe(each: "Cleared", timeout_s: float) -> str:
    if each.outcome is None or each.report is None:
        return {
            "no_answer": f"no answer within {timeout_s:g} s; the wish stays for ten minutes",
            "gone": "it has ended, and its memory with it",
            "not_understood": "it tells nothing of its caches: another version, update it",
        }[each.state.value]
    left = each.report.memory.nbytes
    kept = f" ({_size(left)} are in use)" if left else ""
    return (
        f"freed {_size(each.outcome.memory_freed_nbytes)} of memory{kept},"
        f" removed {each.outcome.disk_removed_entries} entries from disk"
    )


def _print_workers(found: "list[WorkerCaches]") -> None:
    _print_table(
        ("worker", "model", "hits", "memory", "budget", "nodes", "disk", "entries"),
        map(_worker_row, found),
        "no workers",
    )
    _print_table(
        ("model", "namespace", "prefix", "tokens", "hits", "tokens saved"),
        (
            (
                each.worker.alias,
                prefix.namespace,
                prefix.hash[:16],
                str(prefix.num_tokens),
                str(prefix.num_hits),
                str(prefix.saved_tokens),
            )
            for each in found
            if each.report is not None
            for prefix in each.report.top
        ),
        "no prefix was used twice",
    )


def _worker_row(each: "WorkerCaches") -> tuple[str, ...]:
    identity = (each.worker.worker_id, each.worker.alias)
    report = each.report
    if report is None:
        return (*identity, "tells nothing: another version")
    memory, disk = report.memory, report.disk
    budget = "unlimited" if memory.budget_nbytes is None else _size(memory.budget_nbytes)
    on_disk = ("-", "-")
    if disk is not None:
        size = f"{_size(disk.nbytes)} of {_size(disk.budget_nbytes)}"
        on_disk = ("off: the disk failed" if disk.is_off else size, str(disk.num_entries))
    held = (f"{report.hit_share:.0%}", _size(memory.nbytes), budget, str(memory.num_nodes))
    return (*identity, *held, *on_disk)


def _counts(each: "ModelInventory") -> tuple[str, str, str]:
    return str(each.num_entries), str(each.num_tokens), _size(each.nbytes)


def _size(num_bytes: int) -> str:
    return f"{num_bytes / _MIB:.1f} MiB"


def _print_table(titles: tuple[str, ...], rows: Iterable[tuple[str, ...]], empty: str) -> None:
    from rich.console import Console
    from rich.table import Table

    # Off a terminal rich assumes 80 columns and would cut what a script wants to read.
    console = Console(width=None if sys.stdout.isatty() else _PIPE_WIDTH)
    table = Table(*titles)
    for row in rows:
        table.add_row(*row)
    console.print(table if table.row_count else empty)
