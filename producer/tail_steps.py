"""What a tail does, step by step, without doing any of it: the drivers read and wait.

One logic for the synchronous and the asynchronous tail. A step is a Redis command (its reply or
its error comes back), a pause, or an item for the caller.
"""

from collections.abc import Generator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

from headwater.schemas import (
    Cancelled,
    End,
    EntryId,
    Expired,
    Failed,
    GenerationJob,
    StreamEntry,
    decode_entry,
    keys,
)
from redis.exceptions import (
    AuthenticationError,
    BusyLoadingError,
    ConnectionError,  # noqa: A004  (redis' own, which the built-in one is not)
    NoPermissionError,
    ReadOnlyError,
    TimeoutError,  # noqa: A004
)

from .client_queue import RQ_FIELDS, JobState, RQJob, job_key, parse_rq_job, read_payload
from .errors import JobLost, ServerUnavailable, StreamExpired, StreamGap, UnknownJob
from .patience import jittered
from .stream_close import close_command
from .stream_reader import StreamReader, TailItem

_TRANSIENT = (ConnectionError, TimeoutError, BusyLoadingError)
_FIRST_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 2.0


class Command(NamedTuple):
    """A Redis command to send."""

    args: tuple[Any, ...]


class Pause(NamedTuple):
    """A time to wait."""

    seconds: float


Step: TypeAlias = Command | Pause | TailItem
Steps: TypeAlias = Generator[Step, Any, None]


@dataclass(frozen=True, slots=True)
class TailSettings:
    """How long a tail waits for what."""

    block_ms: int = 2_000
    """Of one read; after an idle one the job's state is checked."""
    lost_after_s: float = 30.0
    """How long a job may be ended in RQ and have no end in its stream before it counts as lost:
    a worker's maintenance mends it within two leases."""
    outage_s: float = 60.0
    """How long the server may be away before the tail gives up."""
    reply_margin_s: float = 5.0
    """What a reply may take beyond the read's own blocking time."""
    batch: int = 500
    """Entries per read."""


def tail_steps(job_id: str, after: EntryId | None, settings: TailSettings) -> Steps:
    """Return the steps of a tail of *job_id* that yields what stands after entry *after*.

    Raises StreamError's kinds, ServerUnavailable, and SchemaError for entries that are none.
    """
    return _Tail(job_id, settings).run(after or EntryId(0, 0))


class _Tail:
    def __init__(self, job_id: str, settings: TailSettings) -> None:
        self._job_id = job_id
        self._stream = keys.stream_key(job_id)
        self._settings = settings
        self._reader = StreamReader()
        self._lost_for_s = 0.0
        self._job: GenerationJob | None = None

    def run(self, after: EntryId) -> Steps:
        yield from self._skip_to(after)
        if self._reader.end is not None:
            yield self._reader.end
            return
        # The first look does not block: an unknown job is an error at once.
        block_ms: int | None = None
        while True:
            entries = yield from self._read(block_ms)
            for entry in entries:
                yield from self._reader.feed(entry)
                if self._reader.end is not None:
                    return
            if not entries:
                yield from self._check_state(idle_s=(block_ms or 0) / 1000)
            else:
                self._lost_for_s = 0.0
            block_ms = self._settings.block_ms

    def _skip_to(self, after: EntryId) -> Generator[Step, Any, None]:
        # The entries before the resume point are read again, for their positions: without them
        # an overlap or a hole behind it could not be told.
        while self._reader.last_id < after and self._reader.end is None:
            entries = yield from self._read(None)
            if not entries:
                yield from self._check_state(idle_s=0.0)
            for entry in entries:
                if entry.id <= after:
                    self._reader.feed(entry)
            if not entries or entries[-1].id > after:
                break
        if self._reader.last_id != after:
            raise StreamGap(
                f"job {self._job_id} has no entry {after} in its stream (any more): read it from"
                " its start"
            )

    def _read(self, block_ms: int | None) -> Generator[Step, Any, list[StreamEntry]]:
        block = () if block_ms is None else ("BLOCK", block_ms)
        reply = yield from self._call(
            "XREAD",
            "COUNT",
            self._settings.batch,
            *block,
            "STREAMS",
            self._stream,
            str(self._reader.last_id),
        )
        return parse_xread(reply).get(self._stream, [])

    def _check_state(self, idle_s: float) -> Generator[Step, Any, None]:
        rq_job = parse_rq_job((yield from self._call("HMGET", job_key(self._job_id), *RQ_FIELDS)))
        has_stream = bool((yield from self._call("EXISTS", self._stream)))
        if rq_job is not None and rq_job.state is not JobState.ENDED:
            self._lost_for_s = 0.0
            if rq_job.state is JobState.QUEUED and not has_stream and idle_s > 0:
                yield from self._check_expiry()
            return
        if not has_stream:
            yield from self._check_begun(rq_job)
        self._lost_for_s += idle_s
        if self._lost_for_s >= self._settings.lost_after_s:
            job = yield from self._payload()
            yield from self._write_end(_missing_end(rq_job, job.metadata if job else {}))

    def _check_begun(self, rq_job: RQJob | None) -> Generator[Step, Any, None]:
        """Raise when the stream is gone for good; a job that never had one is only unfinished."""
        seen = self._reader.last_id > EntryId(0, 0)
        if rq_job is None and not seen:
            raise UnknownJob(f"no such job: {self._job_id} (never submitted, or expired)")
        begun = bool((yield from self._call("EXISTS", keys.attempt_key(self._job_id))))
        if begun or seen:
            raise StreamExpired(f"the stream of job {self._job_id} has expired")

    def _check_expiry(self) -> Generator[Step, Any, None]:
        # A worker says `expired` when it claims the job; without any worker nobody else would.
        job = yield from self._payload()
        if job is None or job.expires_at is None:
            return
        seconds, _ = yield from self._call("TIME")
        if seconds > job.expires_at:
            yield from self._write_end(Expired(metadata=job.metadata))

    def _payload(self) -> Generator[Step, Any, GenerationJob | None]:
        if self._job is None:
            data = yield from self._call("HGET", job_key(self._job_id), "data")
            self._job = read_payload(data)
        return self._job

    def _write_end(self, end: End) -> Generator[Step, Any, None]:
        # Written as a new attempt: a worker that wakes is fenced, and all readers see the same.
        try:
            yield from self._call(*close_command(self._job_id, end))
        except (NoPermissionError, ReadOnlyError) as error:
            raise JobLost(f"job {self._job_id} was lost: submit it again") from error
        self._lost_for_s = 0.0

    def _call(self, *args: Any) -> Generator[Step, Any, Any]:
        waited_s, pause_s = 0.0, _FIRST_PAUSE_S
        while True:
            try:
                return (yield Command(args))
            except AuthenticationError as error:
                raise ServerUnavailable(f"the server refuses the login ({error})") from error
            except _TRANSIENT as error:
                if waited_s >= self._settings.outage_s:
                    raise ServerUnavailable(
                        f"no answer from the server for {waited_s:.0f} s ({error})"
                    ) from error
            pause = Pause(jittered(pause_s))
            yield pause
            waited_s += pause.seconds
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


def _missing_end(rq_job: RQJob | None, metadata: dict[str, Any]) -> End:
    if rq_job is not None and rq_job.status in ("canceled", "stopped"):
        return Cancelled(metadata=metadata)
    return Failed(
        code="job_lost",
        message="the job ended without a result; submit it again",
        retryable=True,
        metadata=metadata,
    )


def parse_xread(reply: Any) -> dict[str, list[StreamEntry]]:
    """Return the entries of each stream in XREAD's reply, by the streams' keys."""
    if not reply:
        return {}
    # RESP2 gives a list of [stream, entries], RESP3 a map from stream to [entries].
    streams = reply.items() if isinstance(reply, Mapping) else reply
    return {stream.decode(): _entries(batches) for stream, batches in streams}


def _entries(batches: Any) -> list[StreamEntry]:
    is_nested = len(batches) == 1 and isinstance(batches[0], list)
    entries = batches[0] if is_nested else batches
    return [decode_entry(entry_id, fields) for entry_id, fields in entries]
