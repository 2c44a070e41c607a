"""BulkRun: the rows of one file that are not done yet, from their lines to their records."""

import math
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass
from pathlib import Path

from ..client import Producer
from .flight import Flight, RowOutcome
from .lines import read_lines
from .pipeline import Batch, land, run_rows
from .preparation import Preparation, prepare
from .progress import Display, Tally
from .records import num_tokens, outcome_record, refused_record
from .results import Ordering, Record, ResultFiles
from .rows import RefusedRow, Row
from .stopping import StopSignal
from .windows import FirstLines, windows, without_repeats

_MAX_CHUNK = 64


@dataclass(frozen=True, slots=True)
class Limits:
    """How much a run has in hand at once."""

    window: int = 1024
    """Rows that are sorted together, so that those with a common prefix run together."""
    outstanding: int = 256
    """Jobs that are submitted and not done."""
    max_queue_depth: int | None = None
    """Jobs of anybody's that may wait in the queue before we wait, too."""
    max_row_bytes: int = 16 * 1024 * 1024
    processes: int = 0
    """That tokenize beside the run's own; with 0 it does so itself."""


def read_rows(
    path: Path,
    preparation: Preparation,
    limits: Limits,
    first_lines: FirstLines,
    *,
    is_done: Callable[[int], bool],
) -> Generator[Row, None, None]:
    """Yield the rows of the input that are not done, in order, parsed and tokenized."""
    lines = read_lines(path, limits.max_row_bytes)
    left = (line for line in lines if not is_done(line.number))
    yield from without_repeats(prepare(left, preparation, limits.processes), first_lines)


class BulkRun:
    """One process's share of a run."""

    def __init__(
        self,
        run_id: str,
        path: Path,
        preparation: Preparation,
        limits: Limits,
        tally: Tally,
        *,
        ordered: bool = False,
    ) -> None:
        self._run_id = run_id
        self._path = path
        self._preparation = preparation
        self._limits = limits
        self._tally = tally
        self._ordering: Ordering[_Finished] | None = Ordering() if ordered else None

    def run(
        self,
        producer: Producer,
        results: ResultFiles,
        first_lines: FirstLines,
        display: Display,
        *,
        look_after: Callable[[], None],
    ) -> bool:
        """Work until every row is done, or until a signal; return whether all are.

        *look_after* is called now and then. Raises ProducerError's kinds, and KeyboardInterrupt
        at a second signal.
        """
        rows = read_rows(
            self._path,
            self._preparation,
            self._limits,
            first_lines,
            is_done=lambda line: line in results.done,
        )
        chunk = min(_MAX_CHUNK, self._limits.max_queue_depth or _MAX_CHUNK)
        card = self._preparation.card
        flight = Flight(producer, card, self._run_id, size=self._limits.outstanding, chunk=chunk)
        with StopSignal() as stop, display:
            try:
                batches = run_rows(
                    windows(rows, self._limits.window),
                    flight,
                    is_stopped=lambda: stop.is_set,
                    is_behind=self._is_behind,
                )
                self._take(batches, flight, results, display, look_after)
                if stop.is_set:
                    display.say("finishing the rows that run; Ctrl-C again leaves at once")
                    flight.cancel_queued()
                    self._take(land(flight), flight, results, display, look_after)
            finally:
                rows.close()
                flight.close()
        return not stop.is_set

    def _take(
        self,
        batches: Iterable[Batch],
        flight: Flight,
        results: ResultFiles,
        display: Display,
        look_after: Callable[[], None],
    ) -> None:
        for batch in batches:
            finished = [self._refused(row) for row in batch.refused]
            finished += [self._finished(outcome) for outcome in batch.finished]
            if self._ordering is not None:
                self._ordering.expect(batch.begun)
                pairs = [(each.record.line, each) for each in finished]
                finished = list(self._ordering.pass_on(pairs))
            if finished:
                results.add(each.record for each in finished)
                # Only now: until the results were on the disk, the server had them.
                flight.forget(job for each in finished for job in each.jobs)
            self._tally.good, self._tally.errors = results.num_good, results.num_errors
            look_after()
            display.show(self._tally)

    def _is_behind(self) -> bool:
        most = math.inf if self._ordering is None else 2 * self._limits.window
        return self._ordering is not None and self._ordering.num_behind > most

    def _refused(self, row: RefusedRow) -> "_Finished":
        return _Finished(refused_record(row, self._run_id), [])

    def _finished(self, outcome: RowOutcome) -> "_Finished":
        prompt, cached, generated = num_tokens(outcome)
        self._tally.prompt_tokens += prompt
        self._tally.cached_tokens += cached
        self._tally.generated_tokens += generated
        return _Finished(outcome_record(outcome, self._run_id), outcome.jobs)


@dataclass(frozen=True, slots=True)
class _Finished:
    record: Record
    jobs: list[tuple[str, str]]
    """That the server may forget."""
