"""Watching an Overview: reading it again and again, and showing it where it is wanted."""

from collections.abc import Callable
from typing import Protocol

import orjson
from redis.exceptions import RedisError
from rich.console import Group, RenderableType
from rich.live import Live
from rich.text import Text

from .overview import Overview
from .overview_text import as_line, as_tables
from .patience import insist


class View(Protocol):
    """Where a watch shows what it has read."""

    def show(self, overview: Overview) -> None:
        """Show the present state."""
        ...

    def complain(self, problem: str) -> None:
        """Say why there is none."""
        ...


def watch(read: Callable[[], Overview], view: View, pause: Callable[[], object]) -> None:
    """Read and show until Ctrl-C; a server that goes away is told of and waited for.

    *pause* waits until the next look. Raises RedisError where the first look fails, also when
    it is repeated for a while.
    """
    try:
        view.show(insist(read))
        while True:
            pause()
            try:
                view.show(read())
            except RedisError as error:
                view.complain(f"Redis: {' '.join(str(error).split())}")
    except KeyboardInterrupt:
        return


class LiveView:
    """Tables on a terminal, drawn over themselves."""

    def __init__(self, live: Live) -> None:
        self._live = live
        self._last: RenderableType = ""

    def show(self, overview: Overview) -> None:
        """Draw the state below its headline."""
        self._last = Group(as_line(overview), as_tables(overview))
        self._live.update(self._last, refresh=True)

    def complain(self, problem: str) -> None:
        """Draw the problem above the last state."""
        self._live.update(Group(Text(problem), self._last), refresh=True)


class LineView:
    """One line a look."""

    def __init__(self, write: Callable[[str], object]) -> None:
        self._write = write

    def show(self, overview: Overview) -> None:
        """Write the figures."""
        self._write(as_line(overview))

    def complain(self, problem: str) -> None:
        """Write the problem."""
        self._write(problem)


class JsonView:
    """One JSON object a look, on a line of its own."""

    def __init__(self, write: Callable[[str], object]) -> None:
        self._write = write

    def show(self, overview: Overview) -> None:
        """Write all of it."""
        self._write(orjson.dumps(overview.as_json()).decode())

    def complain(self, problem: str) -> None:
        """Write the problem as an object, too."""
        self._write(orjson.dumps({"error": problem}).decode())
