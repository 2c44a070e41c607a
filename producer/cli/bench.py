"""headwater bench: run us and a peer on the same work, in turn."""

import dataclasses
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from headwater.schemas import GenerationJob

from .options import JsonOption, log_to_stderr, print_json

if TYPE_CHECKING:  # the help must not pay for importing redis
    from ..client import Producer

_Repeat = Annotated[
    int | None, typer.Option("--repeat", min=1, help="Runs to take medians of; default: its own.")
]
_Quick = Annotated[bool, typer.Option("--quick", help="A size that takes at most 20 s.")]
_Plot = Annotated[
    Path | None, typer.Option("--plot", help="A PNG file for a picture of us and the peer.")
]


def register(app: typer.Typer) -> None:
    """Add the command, with one subcommand for each scenario."""
    from headwater.worker.bench.registry import SCENARIOS

    group = typer.Typer(no_args_is_help=True, rich_markup_mode=None)
    for scenario in SCENARIOS.values():
        group.command(scenario.name, help=_help(scenario))(_command(scenario))
    app.add_typer(
        group,
        name="bench",
        help="Measure us and a peer on the same work, in turn.\n\n"
        "Example: headwater bench detok --json",
    )


def _help(scenario: Any) -> str:
    return f"{scenario.summary}\n\nExample: headwater bench {scenario.name} --json"


def _command(scenario: Any) -> Callable[..., None]:
    """Return the scenario's command: its settings' fields are its flags."""

    def command(
        json: bool,
        repeat: int | None = None,
        quick: bool = False,
        plot: Path | None = None,
        **flags: Any,
    ) -> None:
        draw = _prepare_plot(plot)
        report = _run(scenario, scenario.settings(**flags), repeat=repeat, quick=quick)
        _print(report, json=json)
        draw(report)

    parameters = [*map(_flag, dataclasses.fields(scenario.settings)), *_COMMON]
    # typer reads a command's flags from its signature.
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {each.name: each.annotation for each in parameters}
    return command


def _flag(field: "dataclasses.Field[Any]") -> inspect.Parameter:
    name = f"--{field.name.replace('_', '-')}"
    annotation = Annotated[field.type, typer.Option(name, help=field.metadata["help"])]  # type: ignore[name-defined]
    return _keyword(field.name, annotation, field.default)


def _keyword(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation
    )


_COMMON = (
    _keyword("json", JsonOption, False),
    _keyword("repeat", _Repeat, None),
    _keyword("quick", _Quick, False),
    _keyword("plot", _Plot, None),
)


@dataclasses.dataclass(frozen=True)
class _Queue:
    """An embedded server and a producer for it."""

    url: str
    _producer: "Producer"

    def submit(self, jobs: Sequence[GenerationJob]) -> None:
        self._producer.submit_many(jobs)


@contextmanager
def _open_queue() -> Iterator[_Queue]:
    from ..client import Producer, SubmitSettings
    from ..embedded import EmbeddedServer

    # No worker has announced a model: its own check is the one that counts here.
    settings = SubmitSettings(check_model=False)
    with EmbeddedServer() as server, Producer(server.url, settings) as producer:
        yield _Queue(server.url, producer)


def _prepare_plot(path: Path | None) -> Callable[[Any], None]:
    """Return what draws a report; what is missing for that shows here, before the measuring."""
    if path is None:
        return lambda _: None
    from headwater.worker.bench.plot import check_target, draw

    check_target(path)
    return lambda report: draw(report, path)


def _run(scenario: Any, settings: Any, *, repeat: int | None, quick: bool) -> Any:
    from headwater.worker.bench.scenario import run_scenario
    from headwater.worker.engine import blas

    log_to_stderr()
    # Before a scenario imports mlx.
    blas.preload()
    return run_scenario(scenario, settings, repeat=repeat, quick=quick, open_queue=_open_queue)


def _print(report: Any, *, json: bool) -> None:
    if json:
        print_json(report.to_json())
        return
    from rich.console import Console

    Console().print(report.to_table())
