"""A whole run, from what the user wants to its end: `carry_out`, and `dry_run` without the work."""

import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO, Any, NamedTuple

from headwater.schemas import ModelCard, SchemaError

from ..client import Producer, SubmitSettings, new_job
from ..errors import InvalidRequest
from .lines import survey
from .preparation import Preparation
from .progress import Display, Tally
from .results import ResultFiles
from .rows import RefusedRow, RowSettings
from .run import BulkRun, Limits, read_rows
from .run_folder import SPOOLED, RunFolder
from .stack import OwnStack, alias_of
from .windows import FirstLines

_SMALL_INPUT_BYTES = 4 * 1024 * 1024
"""Tokenized sooner than other processes have started."""
_BLOCK = 1 << 20


@dataclass(frozen=True, slots=True)
class BulkOrder:
    """What the user wants."""

    source: Path | None
    """None is standard input."""
    output: Path
    errors: Path
    model: str
    """An alias that workers on *redis* serve; without it a model for a worker of our own."""
    redis: str | None
    rows: RowSettings
    ordered: bool = False
    limits: Limits = field(default_factory=Limits)
    num_workers: int = 1
    max_batch: int | None = None
    force: bool = False

    @property
    def settings(self) -> dict[str, Any]:
        """What makes the results what they are, beside input and model."""
        rows = self.rows
        return {
            "model": self.model,
            "defaults": rows.defaults,
            "seed": rows.seed,
            "override_model": rows.override_model,
            "ordered": self.ordered,
            "errors": self.errors.name,
        }


class Outcome(NamedTuple):
    """What a run came to."""

    tally: Tally
    is_complete: bool
    """Whether every row is in one of the files."""


def order_rows(
    model: str, redis: str | None, *, priority: str, namespace: str, **values: Any
) -> RowSettings:
    """Return the rows' settings for *model*; *values* are RowSettings' other fields.

    Raises InvalidRequest.
    """
    alias, other_names = (model, ()) if redis is not None else (alias_of(model), (model,))
    try:
        # What would fail every single row had better fail the command.
        probe = new_job(alias, [0], max_tokens=1, priority=priority, namespace=namespace)
    except SchemaError as error:
        raise InvalidRequest(f"bad settings: {error}") from error
    return RowSettings(alias, other_names, priority=probe.priority, namespace=namespace, **values)


def carry_out(order: BulkOrder, display: Display) -> Outcome:
    """Do what *order* says, or go on with it; raises ProducerError's kinds."""
    with RunFolder(order.output, order.errors, force=order.force) as folder:
        path = order.source or _spool(folder.path / SPOOLED)
        found = survey(path, order.limits.max_row_bytes)
        identity: dict[str, dict[str, Any]] = {
            "input": {"sha256": found.sha256},
            "settings": order.settings,
        }
        folder.check(identity)
        tally = Tally(found.num_rows)
        first_lines = FirstLines()
        with ResultFiles(order.output, order.errors, first_lines) as results:
            tally.rows_before = len(results.done)
            tally.good, tally.errors = results.num_good, results.num_errors
            if tally.done < tally.num_rows:
                _run(order, folder, path, identity, tally, results, first_lines, display)
        is_complete = tally.done == tally.num_rows
        if is_complete:
            folder.clear()
    return Outcome(tally, is_complete)


def _run(
    order: BulkOrder,
    folder: RunFolder,
    path: Path,
    identity: dict[str, dict[str, Any]],
    tally: Tally,
    results: ResultFiles,
    first_lines: FirstLines,
    display: Display,
) -> None:
    with ExitStack() as exits:
        stack = None
        if order.redis is None:
            display.say(f"starting {_workers(order.num_workers)} with model {order.model}")
            stack = exits.enter_context(
                OwnStack(order.model, folder.path, order.num_workers, order.max_batch)
            )
            stack.wait_until_ready()
        url = stack.url if stack else order.redis
        submit = SubmitSettings(order.limits.max_queue_depth, check_model=False)
        producer = exits.enter_context(Producer(url, submit))
        preparation = _preparation(producer, order)
        identity |= {"model": _model_identity(preparation.card)}
        run_id = folder.enter(identity)
        limits = replace(order.limits, processes=_num_processes(order, path))
        run = BulkRun(run_id, path, preparation, limits, tally, ordered=order.ordered)
        display.say(f"{tally.num_rows} rows, {tally.rows_before} of them done before")
        tally.start()
        run.run(
            producer,
            results,
            first_lines,
            display,
            look_after=stack.keep_running if stack else _nothing,
        )


class Count(NamedTuple):
    """What a dry run found."""

    rows: int
    refused: int
    prompt_tokens: int
    longest_prompt: int
    """In tokens."""


def dry_run(order: BulkOrder, refusals: IO[str]) -> Count:
    """Read, check and tokenize every row, and say to *refusals* which can't run."""
    with ExitStack() as exits:
        folder = Path(exits.enter_context(TemporaryDirectory(prefix="headwater-bulk-")))
        path = order.source or _spool(folder / SPOOLED)
        preparation = exits.enter_context(_announced(order, folder))
        limits = replace(order.limits, processes=_num_processes(order, path))
        rows = read_rows(path, preparation, limits, FirstLines(), is_done=lambda _: False)
        num_rows = num_refused = num_tokens = longest = 0
        for row in rows:
            num_rows += 1
            if isinstance(row, RefusedRow):
                num_refused += 1
                refusals.write(f"{row.body['error']['message']}\n")
                continue
            lengths = [len(job.prompt_token_ids) for job in row.jobs]
            num_tokens += sum(lengths)
            longest = max(longest, *lengths)
    if not num_rows:
        raise InvalidRequest(f"{path} holds no rows")
    return Count(num_rows, num_refused, num_tokens, longest)


@contextmanager
def _announced(order: BulkOrder, folder: Path) -> Iterator[Preparation]:
    """Yield what a worker says of the model; one of our own is gone by then."""
    if order.redis is not None:
        with Producer(order.redis) as producer:
            yield _preparation(producer, order)
        return
    with OwnStack(order.model, folder, 1, None) as stack, Producer(stack.url) as producer:
        stack.wait_until_ready()
        preparation = _preparation(producer, order)
        stack.stop_workers()
        yield preparation


def _preparation(producer: Producer, order: BulkOrder) -> Preparation:
    alias = order.rows.alias
    card = producer.models.card(alias)
    return Preparation(order.rows, card, producer.models.tokenizer(alias).files)


def _model_identity(card: ModelCard) -> dict[str, Any]:
    return card.model_dump(mode="json", include={"source", "vocab_size", "tokenizer_fingerprint"})


def _num_processes(order: BulkOrder, path: Path) -> int:
    if path.stat().st_size < _SMALL_INPUT_BYTES:
        return 0
    return order.limits.processes or max(1, min(4, (os.cpu_count() or 1) - 1))


def _spool(path: Path) -> Path:
    """Keep what comes from standard input; a run that goes on may leave it out."""
    if sys.stdin.isatty():
        if path.exists():
            return path
        raise InvalidRequest("standard input is a terminal: give a file, or pipe rows in")
    new = path.with_suffix(".new")
    with new.open("wb") as file:
        shutil.copyfileobj(sys.stdin.buffer, file, _BLOCK)
    new.replace(path)
    return path


def _nothing() -> None:
    """There are no workers of ours to look after."""


def _workers(number: int) -> str:
    return "a worker" if number == 1 else f"{number} workers"
