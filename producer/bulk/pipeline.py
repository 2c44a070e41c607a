"""From windows of rows to what they come to: the loop that keeps the workers busy."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from .flight import Flight, RowOutcome
from .rows import ReadyRow, RefusedRow
from .windows import Window


class Batch(NamedTuple):
    """What happened since the last one."""

    begun: list[int]
    """Lines whose rows were taken up."""
    refused: list[RefusedRow]
    finished: list[RowOutcome]


def run_rows(
    windows: Iterable[Window],
    flight: Flight,
    *,
    is_stopped: Callable[[], bool],
    is_behind: Callable[[], bool],
) -> Iterator[Batch]:
    """Submit the rows of *windows* and yield what they come to, as it comes.

    Once *is_stopped*, nothing more is submitted. While *is_behind*, no further window is begun.
    """
    for window in windows:
        lines = [row.line for row in window.refused] + [row.line for row in window.ready]
        yield Batch(lines, window.refused, [])
        yield from _submit(deque(window.ready), flight, is_stopped)
        while is_behind() and not is_stopped():
            yield Batch([], [], flight.collect())
        if is_stopped():
            return
    while not flight.is_empty and not is_stopped():
        yield Batch([], [], flight.collect())


def _submit(
    rows: deque[ReadyRow], flight: Flight, is_stopped: Callable[[], bool]
) -> Iterator[Batch]:
    while rows and not is_stopped():
        taken, room = [], flight.room
        while rows and room > 0:
            room -= len(rows[0].jobs)
            taken.append(rows.popleft())
        if taken:
            flight.submit(taken)
        else:
            yield Batch([], [], flight.collect())


def land(flight: Flight) -> Iterator[Batch]:
    """Yield what still comes of rows that were submitted."""
    while not flight.is_empty:
        yield Batch([], [], flight.collect())
