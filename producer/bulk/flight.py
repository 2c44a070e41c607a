"""Flight: rows whose jobs are submitted and not yet all ended, and one read for all their streams.

A row's job ids follow from the run and the line. A run that goes on after its death finds the
jobs that it submitted before, and reads their streams instead of submitting them again.
"""

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from headwater.schemas import (
    Cancelled,
    Failed,
    GenerationJob,
    HeadwaterError,
    ModelCard,
    StreamEntry,
    keys,
)
from redis.exceptions import RedisError

from ..client import Producer
from ..client_cancel import CancelOutcome
from ..client_forget import forget_jobs
from ..client_queue import RQ_FIELDS, JobState, job_key, parse_rq_job
from ..errors import InvalidRequest, QueueFull, ServerUnavailable, StreamError
from ..openai_protocol.errors import ApiError
from ..result import GenerationResult, ResultCollector
from ..stream_reader import Ended, StreamReader
from ..tail import TailSettings, read_many, reading_client, tail
from .rows import ReadyRow

MAX_TRIES = 3
"""Of a row whose job was lost, or failed for a reason that may pass."""
_BLOCK_MS = 500
_CHECK_EVERY_S = 2.0
_LOST_AFTER_S = 30.0
"""How long a job may be ended in RQ without an end in its stream: maintenance mends it sooner."""
_OUTAGE_S = 60.0
"""How long the server may be away."""
_PAUSE_S = 0.2
"""Between two tries while the queue is full or the server away: neither tells when it is not."""


class RowOutcome(NamedTuple):
    """What a row came to."""

    row: ReadyRow
    job_ids: tuple[str, ...]
    results: tuple[GenerationResult, ...]
    """One a job; none where *error* says why."""
    error: HeadwaterError | None = None

    @property
    def jobs(self) -> list[tuple[str, str]]:
        """Each job's id and the name of its queue."""
        pairs = zip(self.job_ids, self.row.jobs, strict=False)
        return [(job_id, keys.job_queue_name(job)) for job_id, job in pairs]


@dataclass(eq=False, slots=True)
class _RowInFlight:
    row: ReadyRow
    attempt: int = 0
    """Numbers the row's jobs; an earlier process may have made some of them."""
    tries: int = 0
    """Attempts that this process has made."""
    flying: list["_JobInFlight"] = field(default_factory=list)


@dataclass(eq=False, slots=True)
class _JobInFlight:
    job: GenerationJob
    row: _RowInFlight
    is_adopted: bool
    """Whether it was there before we came."""
    reader: StreamReader = field(default_factory=StreamReader)
    collector: ResultCollector = field(default_factory=ResultCollector)
    suspect_since: float | None = None
    """When RQ was first seen to know no running job, while the stream had no end."""

    @property
    def has_ended(self) -> bool:
        return self.reader.end is not None

    def feed(self, entries: Iterable[StreamEntry]) -> None:
        for entry in entries:
            for item in self.reader.feed(entry):
                self.collector.feed(item)


class Flight:
    """Submits rows and collects what they come to. One thread, one model."""

    def __init__(
        self, producer: Producer, card: ModelCard, run_id: str, *, size: int, chunk: int = 64
    ) -> None:
        """Keep at most about *size* jobs outstanding, *chunk* rows in one submit.

        *run_id* makes the ids of all jobs.
        """
        self._producer = producer
        self._card = card
        self._run_id = run_id
        self._size = size
        self._chunk = chunk
        self._settings = TailSettings(block_ms=_BLOCK_MS)
        self._reader = reading_client(producer.redis, self._settings)
        self._jobs: dict[str, _JobInFlight] = {}
        self._waiting: list[_RowInFlight] = []
        """To be submitted, for the first time or again."""
        self._refused: list[RowOutcome] = []
        self._checked_at = time.monotonic()
        self._failing_since: float | None = None

    def close(self) -> None:
        """Close the connection that reads."""
        self._reader.close()

    @property
    def room(self) -> int:
        """How many more jobs may be submitted now."""
        return 0 if self._waiting else max(0, self._size - len(self._jobs))

    @property
    def is_empty(self) -> bool:
        """Whether nothing is outstanding."""
        return not self._jobs and not self._waiting and not self._refused

    def submit(self, rows: Sequence[ReadyRow]) -> None:
        """Submit *rows*, or note that their jobs are there already.

        While the queue is full or the server is away they wait for a later collect().
        """
        self._waiting += [_RowInFlight(row) for row in rows]
        self._launch()

    def collect(self) -> list[RowOutcome]:
        """Return the rows that are done; waits a moment where there are none yet.

        Raises ServerUnavailable when the server has been away for too long.
        """
        if self._waiting:
            self._launch()
        try:
            self._read()
            if time.monotonic() - self._checked_at >= _CHECK_EVERY_S:
                self._check()
        except (RedisError, ServerUnavailable) as error:
            self._wait_out(error)
            return []
        if not self._waiting:
            self._failing_since = None
        return list(self._take_done())

    def cancel_queued(self) -> None:
        """Take back what no worker has begun; what runs goes on."""
        self._waiting.clear()
        pipeline: Any = self._producer.redis.pipeline(transaction=False)
        job_ids = list(self._jobs)
        for job_id in job_ids:
            pipeline.hmget(job_key(job_id), *RQ_FIELDS)
        for job_id, reply in zip(job_ids, pipeline.execute(), strict=True):
            rq_job = parse_rq_job(reply)
            if rq_job is not None and rq_job.state is JobState.QUEUED and job_id in self._jobs:
                outcome = self._producer.cancel(job_id)
                if outcome in (CancelOutcome.CANCELLED, CancelOutcome.REQUESTED):
                    self._drop(self._jobs[job_id].row)

    def cancel_all(self) -> None:
        """Cancel whatever is outstanding; nobody waits for it any more."""
        self._waiting.clear()
        # A server that is away keeps its jobs; there is nobody to tell.
        with suppress(RedisError):
            while self._jobs:
                job_id, _ = self._jobs.popitem()
                self._producer.cancel(job_id)

    def forget(self, jobs: Iterable[tuple[str, str]]) -> None:
        """Delete what the server holds of these jobs (see RowOutcome.jobs), whose results are in
        a safe place.
        """
        # Where the server is away they expire by themselves.
        with suppress(RedisError):
            forget_jobs(self._producer.redis, jobs)

    # Submitting.

    def _launch(self) -> None:
        """Submit what waits; a queue that is full and a server that is away leave the rest."""
        try:
            while self._waiting:
                self._submit(self._waiting[: self._chunk])
                del self._waiting[: self._chunk]
            self._failing_since = None
        except QueueFull:
            self._failing_since = None
            if not self._jobs:
                time.sleep(_PAUSE_S)
        except (RedisError, ServerUnavailable) as error:
            # Sent again later: jobs that are there by then are found.
            self._wait_out(error)

    def _submit(self, rows: Sequence[_RowInFlight]) -> None:
        named = [(row, job) for row in rows for job in self._named(row)]
        known = self._which_exist([job.job_id for _, job in named])
        new = [job for _, job in named if job.job_id not in known]
        try:
            self._producer.submit_many(new, card=self._card)
        except InvalidRequest as error:
            if len(rows) == 1:
                self._refused.append(RowOutcome(rows[0].row, (), (), error))
                return
            for row in rows:
                self._submit([row])
            return
        for row in rows:
            row.flying = []
        for row, job in named:
            flying = _JobInFlight(job, row, is_adopted=job.job_id in known)
            row.flying.append(flying)
            self._jobs[job.job_id] = flying
        for row in rows:
            row.tries += not all(flying.is_adopted for flying in row.flying)

    def _named(self, row: _RowInFlight) -> Iterator[GenerationJob]:
        base = f"{self._run_id}-{row.row.line}" + (f"-r{row.attempt}" if row.attempt else "")
        for number, job in enumerate(row.row.jobs):
            yield job.model_copy(update={"job_id": f"{base}-{number}" if number else base})

    def _which_exist(self, job_ids: Sequence[str]) -> set[str]:
        pipeline: Any = self._producer.redis.pipeline(transaction=False)
        for job_id in job_ids:
            pipeline.exists(job_key(job_id))
        replies = pipeline.execute()
        return {job_id for job_id, exists in zip(job_ids, replies, strict=True) if exists}

    # Collecting.

    def _read(self) -> None:
        if not self._jobs:
            return
        positions = {keys.stream_key(i): flying.reader.last_id for i, flying in self._jobs.items()}
        by_stream = {keys.stream_key(i): flying for i, flying in self._jobs.items()}
        for stream, entries in read_many(self._reader, positions, self._settings).items():
            flying = by_stream[stream]
            try:
                flying.feed(entries)
            except StreamError:
                # It can't be read on; another attempt has another stream.
                self._retry(flying.row)

    def _take_done(self) -> Iterator[RowOutcome]:
        rows = {flying.row: None for flying in self._jobs.values() if flying.has_ended}
        for row in rows:
            if not all(flying.has_ended for flying in row.flying):
                continue
            results = tuple(flying.collector.result() for flying in row.flying)
            if self._is_void(row, results):
                self._retry(row)
            else:
                self._drop(row)
                yield RowOutcome(row.row, _job_ids(row), results)
        yield from self._given_up()

    def _given_up(self) -> Iterator[RowOutcome]:
        """Take the rows that were tried too often out of those to try again."""
        rows, self._waiting = self._waiting, []
        for row in rows:
            if row.tries < MAX_TRIES:
                self._waiting.append(row)
            else:
                error = ApiError(500, "the row's job was lost again and again", code="job_lost")
                yield RowOutcome(row.row, _job_ids(row), (), error)
        yield from self._refused
        self._refused = []

    def _is_void(self, row: _RowInFlight, results: Sequence[GenerationResult]) -> bool:
        """Whether the row has to be run again."""
        for flying, result in zip(row.flying, results, strict=True):
            if flying.is_adopted and isinstance(result.end, Cancelled):
                return True  # by the run that submitted it, when it was interrupted
            if isinstance(result.end, Failed) and result.end.retryable:
                return row.tries < MAX_TRIES
        return False

    def _retry(self, row: _RowInFlight) -> None:
        """Take the row's jobs out and let others do its work."""
        self._drop(row)
        row.attempt += 1
        self._waiting.append(row)

    def _drop(self, row: _RowInFlight) -> None:
        for flying in row.flying:
            self._jobs.pop(flying.job.job_id, None)

    # Jobs that will never end by themselves.

    def _check(self) -> None:
        self._checked_at = now = time.monotonic()
        flying = list(self._jobs.values())
        pipeline: Any = self._producer.redis.pipeline(transaction=False)
        for each in flying:
            pipeline.hmget(job_key(each.job.job_id), *RQ_FIELDS)
            pipeline.exists(keys.stream_key(each.job.job_id))
        replies = pipeline.execute()
        for each, fields, has_stream in zip(flying, replies[::2], replies[1::2], strict=True):
            rq_job = parse_rq_job(fields)
            if each.has_ended or (rq_job is not None and rq_job.state is not JobState.ENDED):
                each.suspect_since = None
                continue
            since = each.suspect_since = each.suspect_since or now
            if not has_stream or now - since >= _LOST_AFTER_S:
                self._settle(each)

    def _settle(self, flying: _JobInFlight) -> None:
        """Let a tail judge a job: it has the rules, and writes the end that is missing."""
        settings = TailSettings(block_ms=100, lost_after_s=0.0)
        try:
            items = list(tail(self._producer.redis, flying.job.job_id, settings=settings))
        except StreamError:
            if flying.job.job_id in self._jobs:
                self._retry(flying.row)
            return
        flying.collector = ResultCollector()
        for item in items:
            flying.collector.feed(item)
            if isinstance(item, Ended):
                flying.reader.end = item

    def _wait_out(self, error: Exception) -> None:
        now = time.monotonic()
        if self._failing_since is None:
            self._failing_since = now
        if now - self._failing_since >= _OUTAGE_S:
            raise ServerUnavailable(
                f"the server has failed for {_OUTAGE_S:.0f} s ({error})"
            ) from error
        time.sleep(_PAUSE_S)


def _job_ids(row: _RowInFlight) -> tuple[str, ...]:
    return tuple(flying.job.job_id for flying in row.flying)
