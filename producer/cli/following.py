"""Printing a job's items as they come, and the exit code that says how it ended."""

from collections.abc import Iterable
from typing import Any

import typer
from headwater.schemas import Cancelled, Expired, Failed, Finished

from ..errors import JobLost, StreamExpired, UnknownJob
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
    line: dict[str, Any] = {"id": str(item.id)}
    if isinstance(item, Output):
        part = {
            "choice": item.choice,
            "start": item.start,
            "token_ids": item.token_ids,
            "text": [span.model_dump(mode="json") for span in item.text],
        }
        line |= {"type": "delta", "parts": [part]}
    else:
        event = item.event if isinstance(item, Ended) else item.fence
        line |= event.model_dump(mode="json", exclude_none=True)
    print_json(line)


class _TextPrinter:
    """Writes the text as it comes; what is not text goes to stderr."""

    def __init__(self) -> None:
        self._has_text = False

    def print(self, item: TailItem) -> None:
        if isinstance(item, Output):
            for span in item.text:
                typer.echo(span.text, nl=False)
                self._has_text = True
        elif isinstance(item, Restart):
            typer.echo("\n[restarted: the text so far is void]", err=True)
            self._has_text = False
        elif isinstance(item, Ended):
            self._print_end(item)

    def _print_end(self, ended: Ended) -> None:
        event = ended.event
        if isinstance(event, Finished) and not self._has_text:
            # A job with stream="final" has its text here.
            for choice in event.choices:
                typer.echo(choice.text or "", nl=False)
        typer.echo()
        if isinstance(event, Failed):
            typer.echo(f"headwater: the job failed: {event.code}: {event.message}", err=True)
        elif not isinstance(event, Finished):
            typer.echo(f"headwater: the job was {event.type}", err=True)
