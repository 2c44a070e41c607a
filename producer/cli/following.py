"""Printing a job's items as they come, and the exit code that says how it ended."""

from collections import defaultdict
from collections.abc import Iterable

import typer
from headwater.schemas import (
    Cancelled,
    Channel,
    End,
    Expired,
    Failed,
    Finished,
    TextSpan,
)

from ..errors import JobLost, StreamExpired, UnknownJob
from ..item_json import item_json
from ..stream_reader import Ended, Output, Restart, TailItem
from .options import print_json

EXIT_FAILED = 3
EXIT_CANCELLED = 4
EXIT_EXPIRED = 5


def follow(items: Iterable[TailItem], *, as_json: bool) -> None:
    """Print *items*; leaves by typer.Exit with the code of the job's end.

    0 finished, 3 failed or lost, 4 cancelled, 5 expired or unknown.
    """
    printer = _print_event if as_json else _TextPrinter().print
    try:
        for item in items:
            printer(item)
            if isinstance(item, Ended):
                raise typer.Exit(_exit_code(item))
    except (UnknownJob, StreamExpired) as error:
        typer.echo(f"headwater: {error}", err=True)
        raise typer.Exit(EXIT_EXPIRED) from error
    except JobLost as error:
        typer.echo(f"headwater: {error}", err=True)
        raise typer.Exit(EXIT_FAILED) from error


def _exit_code(ended: Ended) -> int:
    codes = {Finished: 0, Failed: EXIT_FAILED, Cancelled: EXIT_CANCELLED, Expired: EXIT_EXPIRED}
    return codes[type(ended.event)]


def _print_event(item: TailItem) -> None:
    print_json({"id": str(item.id), **item_json(item)})


class _TextPrinter:
    """Writes the first choice's content as it comes, the others' at the end.

    Notes, reasoning and tool calls go to stderr.
    """

    def __init__(self) -> None:
        self._texts: defaultdict[int, str] = defaultdict(str)

    def print(self, item: TailItem) -> None:
        if isinstance(item, Output):
            for span in item.text:
                if span.channel is Channel.CONTENT:
                    self._texts[item.choice] += span.text
                if item.choice == 0:
                    self._print_span(span)
        elif isinstance(item, Restart):
            typer.echo("\n[restarted: the text so far is void]", err=True)
            self._texts.clear()
        elif isinstance(item, Ended):
            self._print_end(item.event)

    def _print_span(self, span: TextSpan) -> None:
        if span.name is not None:
            typer.echo(f"\n[calls {span.name}] ", nl=False, err=True)
        typer.echo(span.text, nl=False, err=span.channel is not Channel.CONTENT)

    def _print_end(self, event: End) -> None:
        if isinstance(event, Finished) and (event.scores or event.embedding):
            _print_readings(event)
            return
        if isinstance(event, Finished) and not self._texts:
            # A job with stream="final" has its text here.
            self._texts.update({choice.choice: choice.text or "" for choice in event.choices})
            typer.echo(self._texts[0], nl=False)
        typer.echo()
        for choice in sorted(self._texts.keys() - {0}):
            typer.echo(f"--- choice {choice}", err=True)
            typer.echo(self._texts[choice])
        if isinstance(event, Failed):
            typer.echo(f"headwater: the job failed: {event.code}: {event.message}", err=True)
        elif not isinstance(event, Finished):
            typer.echo(f"headwater: the job was {event.type}", err=True)


def _print_readings(event: Finished) -> None:
    """Print what was asked for of a prompt: a line for each continuation, or the vector."""
    for score in event.scores:
        greedy = " greedy" if score.is_greedy else ""
        typer.echo(f"{score.continuation} {score.logprob:.6f}{greedy}")
    if event.embedding is not None:
        print_json(event.embedding.floats())
