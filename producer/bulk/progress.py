"""How far a run is: counts, and their display on a terminal or as plain lines."""

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Protocol, Self

_LINE_EVERY_S = 10.0


@dataclass(slots=True)
class Tally:
    """What a run has done so far. Times are time.monotonic()'s."""

    num_rows: int
    """Of the input."""
    rows_before: int = 0
    """Finished by earlier processes."""
    good: int = 0
    """Rows in the output file, earlier ones included."""
    errors: int = 0
    """Rows in the error file, earlier ones included."""
    prompt_tokens: int = 0
    """Of this process's rows, as the following ones."""
    cached_tokens: int = 0
    generated_tokens: int = 0
    started_at: float = field(default_factory=time.monotonic)

    def start(self) -> None:
        """Begin to count time."""
        self.started_at = time.monotonic()

    @property
    def done(self) -> int:
        """Finished rows."""
        return self.good + self.errors

    @property
    def wall_s(self) -> float:
        """Seconds since this process began with rows."""
        return time.monotonic() - self.started_at

    @property
    def s_per_1000_rows(self) -> float | None:
        """What a thousand rows cost; None before the first one."""
        here = self.done - self.rows_before
        return 1000 * self.wall_s / here if here else None

    @property
    def reused_share(self) -> float:
        """Share of the prompt tokens whose keys and values were there already."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    @property
    def eta_s(self) -> float | None:
        """Seconds to go, by the rows so far; None before the first one."""
        here = self.done - self.rows_before
        return (self.num_rows - self.done) * self.wall_s / here if here else None

    def line(self) -> str:
        """Return all of it in one line."""
        wall_s = max(self.wall_s, 1e-9)
        eta_s = self.eta_s
        left = "" if eta_s is None or self.done == self.num_rows else f", {_clock(eta_s)} to go"
        return (
            f"{self.done}/{self.num_rows} rows, {self.errors} errors,"
            f" {self.generated_tokens / wall_s:.1f} tokens/s,"
            f" {100 * self.reused_share:.0f}% of prompt tokens reused{left}"
        )

    def summary(self) -> dict[str, Any]:
        """Return what a finished or interrupted run says."""
        return {
            "rows": self.num_rows,
            "done": self.done,
            "done_before": self.rows_before,
            "good": self.good,
            "errors": self.errors,
            "prompt_tokens": self.prompt_tokens,
            "reused_share": round(self.reused_share, 4),
            "generated_tokens": self.generated_tokens,
            "wall_s": round(self.wall_s, 3),
            "s_per_1000_rows": self.s_per_1000_rows and round(self.s_per_1000_rows, 3),
        }


class Display(Protocol):
    """Shows a tally while it grows; a context manager."""

    def __enter__(self) -> Self:
        """Begin."""
        ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
        /,
    ) -> None:
        """End."""
        ...

    def say(self, line: str) -> None:
        """Tell what goes on besides."""
        ...

    def show(self, tally: Tally) -> None:
        """Show it, as often as it is called or less."""
        ...


def display() -> Display:
    """Return a bar where standard error is a terminal, plain lines elsewhere."""
    return _Bar() if sys.stderr.isatty() else PlainLines(_say)


def _say(line: str) -> None:
    sys.stderr.write(f"headwater bulk: {line}\n")
    sys.stderr.flush()


class PlainLines:
    """A line now and then."""

    def __init__(
        self, say: Callable[[str], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._say = say
        self._clock = clock
        self._next_at = clock() + _LINE_EVERY_S

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return

    def say(self, line: str) -> None:
        """Say it at once."""
        self._say(line)

    def show(self, tally: Tally) -> None:
        """Say it when the last line is some seconds old."""
        if self._clock() >= self._next_at:
            self._next_at = self._clock() + _LINE_EVERY_S
            self._say(tally.line())


class _Bar:
    """A bar with the line behind it."""

    def __init__(self) -> None:
        # Late: most runs have no terminal.
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn

        columns = (BarColumn(), TextColumn("{task.fields[line]}"))
        self._progress = Progress(*columns, console=Console(stderr=True))
        self._task = self._progress.add_task("", line="")

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def say(self, line: str) -> None:
        self._progress.console.print(line, markup=False, highlight=False)

    def show(self, tally: Tally) -> None:
        self._progress.update(
            self._task, total=tally.num_rows, completed=tally.done, line=tally.line()
        )


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}"
