"""The publisher thread: every job's entries to its stream, in order, many jobs in one trip."""

import random
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import structlog
from headwater.schemas import DeltaPart, End, EntryId, Released, SchemaError, Started
from redis import Redis
from redis.exceptions import RedisError, ResponseError

from .booking.finalize import Closing, Finalizer
from .booking.rq_jobs import RQBook, RunningJob
from .messages import Claim, Drop
from .outages import Outages
from .outbox import Entry, LastEntry, Outbox
from .redis_client import TakesNoWrites, is_passing
from .streams import Appended, Begun, JobStreams
from .watched_thread import WatchedThread

log = structlog.get_logger()

_FIRST_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 2.0


@dataclass(frozen=True, slots=True)
class PublisherSettings:
    """What the publisher is told."""

    worker_id: str
    sampler_version: int
    running_ttl_ms: int = 3_600_000
    """How long a stream outlives its newest entry while its job runs."""
    stream_ttl_ms: int = 3_600_000
    """How long a stream can be read after its end."""
    max_pending_bytes: int = 64 * 2**20
    """Of all jobs together that wait for the server; beyond that the engine waits."""


class Publisher:
    """Takes a job's deltas and its end from the engine thread and writes them from its own.

    A tick sends at most one entry of each job, in one pipeline; what comes meanwhile is merged
    into the next. The same entry goes again, under the same id, until the server has it.
    """

    def __init__(
        self,
        redis: Redis,
        book: RQBook,
        settings: PublisherSettings,
        *,
        drop: Callable[[Drop], None],
        on_death: Callable[[BaseException], None],
        on_written: Callable[[float], None] = lambda _: None,
        clock: Callable[[], float] = time.monotonic,
        outages: Outages | None = None,
    ) -> None:
        """*drop* tells the engine of a job that is not ours any more; *on_death* must end us.

        *on_written* is told the age of the oldest token of every trip that the server confirmed.
        """
        self._settings = settings
        self._on_written = on_written
        self._clock = clock
        self._streams = JobStreams(redis)
        self._finalizer = Finalizer(redis, book, stream_ttl_ms=settings.stream_ttl_ms)
        self._drop = drop
        self._lock = threading.Condition()
        self._outboxes: dict[str, Outbox] = {}
        self._pending_bytes = 0
        self._has_news = False
        self._needs_check = False
        """Whether the server may have lost confirmed entries (it was away)."""
        self._pause_s = _FIRST_PAUSE_S
        self._outages = outages or Outages()
        self._thread = WatchedThread("publisher", self._run, on_death)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    @property
    def num_open(self) -> int:
        """Jobs of ours whose last entry is not written."""
        with self._lock:
            return len(self._ours())

    @property
    def backlog_s(self) -> float:
        """Age of the oldest token that the server has not confirmed."""
        with self._lock:
            since = [box.oldest_s for box in self._ours()]
        oldest = min((each for each in since if each is not None), default=None)
        return 0.0 if oldest is None else self._clock() - oldest

    @property
    def backlog_bytes(self) -> int:
        """What waits for the server."""
        return self._pending_bytes

    @property
    def has_room(self) -> bool:
        """Whether more may be published without waiting."""
        return self._pending_bytes < self._settings.max_pending_bytes

    def open_claims(self) -> list[Claim]:
        """Return the claims whose last entry is neither written nor about to be."""
        with self._lock:
            return [box.claim for box in self._ours() if box.last is None]

    def claims(self) -> list[Claim]:
        """Return all claims whose last entry is not written."""
        with self._lock:
            return [box.claim for box in self._ours()]

    def silent_claims(self) -> list[Claim]:
        """Return the claims that this process' death would count against."""
        with self._lock:
            return [box.claim for box in self._ours() if box.is_silent]

    def holds(self, job_id: str) -> bool:
        """Whether the engine may still have something to say of a job, ours or lost.

        Such a job can't be taken in again: what its old run says would pass for the new one's.
        """
        return job_id in self._outboxes

    def open(self, claim: Claim) -> None:
        """Take a job in, before the engine hears of it."""
        with self._lock:
            self._outboxes[claim.job_id] = Outbox.of(claim)

    def delta(self, job_id: str, parts: Iterable[DeltaPart]) -> None:
        """Publish what a job's choices gained; a job that is not open is ignored."""
        with self._lock:
            outbox = self._outboxes.get(job_id)
            if outbox is None or outbox.is_lost:
                return
            before = outbox.pending.nbytes
            outbox.pending.add(parts)
            outbox.pending_since_s = outbox.pending_since_s or self._clock()
            self._pending_bytes += outbox.pending.nbytes - before
            self._wake()

    def restart(self, job_id: str) -> None:
        """Tell a job's readers that the text so far is void."""
        with self._lock:
            outbox = self._outboxes.get(job_id)
            if outbox is not None:
                outbox.void()
                self._wake()

    def end(self, job_id: str, end: End) -> None:
        """Publish a job's end."""
        self._set_last(job_id, end)

    def release(self, job_id: str, reason: str) -> None:
        """Hand a job back to its queue."""
        self._set_last(job_id, Released(reason=reason))

    def abandon(self, job_id: str) -> None:
        """Write nothing more of a job that is not ours any more, and have the engine drop it."""
        with self._lock:
            outbox = self._outboxes.get(job_id)
        if outbox is not None:
            self._abandon(outbox)

    def forget(self, job_id: str) -> None:
        """Close a job whose last entry is written, or that the engine has dropped."""
        with self._lock:
            outbox = self._outboxes.pop(job_id, None)
            if outbox is not None:
                self._pending_bytes -= outbox.pending.nbytes
                self._lock.notify_all()

    def wait_for_room(self, timeout_s: float) -> bool:
        """Wait until there is room, at most *timeout_s*; return whether there is."""
        with self._lock:
            return self._lock.wait_for(lambda: self.has_room, timeout_s)

    def wait_until_closed(self, timeout_s: float) -> bool:
        """Wait until every job's last entry is written, at most *timeout_s*."""
        with self._lock:
            return self._lock.wait_for(lambda: not self._ours(), timeout_s)

    def stop(self) -> None:
        """End the thread; what is not written by now stays unwritten."""
        with self._lock:
            self._thread.stopping.set()
            self._wake()
        self._thread.stop()

    # The thread.

    def _run(self) -> None:
        while self._wait_for_news():
            self._tick()

    def _wait_for_news(self) -> bool:
        with self._lock:
            self._lock.wait_for(lambda: self._has_news or self._thread.stopping.is_set())
            self._has_news = False
            return not self._thread.stopping.is_set()

    def _tick(self) -> None:
        try:
            if self._needs_check:
                self._check_all()
            self._send_entries()
            self._close_jobs()
        except RedisError as error:
            self._back_off(error)
        else:
            self._pause_s = _FIRST_PAUSE_S

    def _back_off(self, error: RedisError) -> None:
        self._outages.note("redis_unavailable", error, pause_s=round(self._pause_s, 3))
        self._needs_check = True
        with self._lock:
            self._has_news = True
            # Jittered, so that many workers do not come back at one moment.
            pause_s = self._pause_s * random.uniform(0.5, 1.5)  # noqa: S311 - no secret
            self._lock.wait_for(lambda: self._thread.stopping.is_set(), pause_s)
        self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)

    def _send_entries(self) -> None:
        """Send one entry of each job that has something to say."""
        with self._lock:
            boxes = self._ours()
            entries = [(box, entry) for box in boxes if (entry := self._next_entry(box))]
            self._pending_bytes = sum(box.pending.nbytes for box in boxes)
            self._lock.notify_all()
        if not entries:
            return
        triples = [(box.job_id, entry.id, entry.event) for box, entry in entries]
        outcomes = self._streams.append_all(triples, self._settings.running_ttl_ms)
        self._tell_age(
            box
            for (box, _), outcome in zip(entries, outcomes, strict=True)
            if outcome is Appended.WRITTEN
        )
        for (box, _), outcome in zip(entries, outcomes, strict=True):
            with self._alone(box):
                self._appended(box, outcome)
        if Appended.LATER in outcomes:
            raise TakesNoWrites("the server takes no writes now")

    def _tell_age(self, written: Iterable[Outbox]) -> None:
        since = [box.unacknowledged_since_s for box in written]
        if oldest := [each for each in since if each is not None]:
            self._on_written(self._clock() - min(oldest))

    def _next_entry(self, outbox: Outbox) -> Entry | None:
        return outbox.next_entry(self._settings.worker_id, self._settings.sampler_version)

    def _appended(self, outbox: Outbox, outcome: Appended) -> None:
        if outcome is Appended.WRITTEN:
            with self._lock:
                outbox.acknowledge()
                if outbox.pending or outbox.last is not None:
                    self._has_news = True
        elif outcome is Appended.GONE:
            self._begin_anew(outbox)
        elif outcome is Appended.BROKEN:
            self._lose(outbox, "its stream is broken")
        elif outcome is not Appended.LATER:
            self._check(outbox)

    def _close_jobs(self) -> None:
        with self._lock:
            boxes = self._ours()
            due = [(box, entry) for box in boxes if (entry := box.last_entry())]
        for outbox, entry in due:
            with self._alone(outbox):
                self._close(outbox, entry)

    def _close(self, outbox: Outbox, entry: LastEntry) -> None:
        closing = self._finalizer.close(self._running(outbox), entry.id, entry.event)
        if closing is Closing.DONE:
            self.forget(outbox.job_id)
        elif closing is Closing.NOT_OURS:
            self._lose(outbox, "ended by another")
        elif closing is Closing.GONE:
            self._begin_anew(outbox)
        else:
            self._check(outbox)

    @contextmanager
    def _alone(self, outbox: Outbox) -> Iterator[None]:
        """What is wrong with one job's keys costs that job, not the others."""
        try:
            yield
        except (ResponseError, SchemaError) as error:
            if isinstance(error, RedisError) and is_passing(error):
                raise
            self._lose(outbox, str(error))

    def _lose(self, outbox: Outbox, reason: str) -> None:
        log.warning("job_lost", job_id=outbox.job_id, attempt=outbox.attempt, reason=reason)
        self._abandon(outbox)

    def _check_all(self) -> None:
        """After the server was away: send again what it has lost of what it had confirmed."""
        with self._lock:
            boxes = self._ours()
        for outbox in boxes:
            with self._alone(outbox):
                self._check(outbox)
        self._needs_check = False

    def _check(self, outbox: Outbox) -> None:
        tip = self._streams.tip(outbox.job_id)
        if tip is None or tip.id.attempt < outbox.attempt:
            # The stream, or our fence in it, is lost.
            self._begin_anew(outbox)
        elif tip.id.attempt > outbox.attempt:
            if tip.execution_id == outbox.claim.execution_id:
                # We began anew and did not hear of it.
                self._begin_anew(outbox)
            else:
                self._lose(outbox, "fenced")
        elif tip.id.seq > outbox.newest_seq:
            self._lose(outbox, "somebody else writes under our attempt")
        else:
            self._resend(outbox, tip.id)

    def _resend(self, outbox: Outbox, last_id: EntryId) -> None:
        lost = outbox.rewind(last_id)
        if lost is None:
            self._begin_anew(outbox)
            return
        for entry in lost:
            triple = (outbox.job_id, entry.id, entry.event)
            (outcome,) = self._streams.append_all([triple], self._settings.running_ttl_ms)
            if outcome is Appended.LATER:
                raise TakesNoWrites("the server takes no writes now")
            if outcome is not Appended.WRITTEN:
                # The stream has changed since we looked. What follows would be refused, too,
                # and a job that tells nothing for a while would not hear of it.
                self._appended(outbox, outcome)
                return
        with self._lock:
            self._wake()

    def _begin_anew(self, outbox: Outbox) -> None:
        """Open another attempt that tells all there is to tell; readers drop what they have."""
        fence = Started(
            worker_id=self._settings.worker_id,
            sampler_version=self._settings.sampler_version,
            metadata=outbox.claim.job.metadata,
        )
        execution = outbox.claim.execution_id
        ttl_ms = self._settings.running_ttl_ms
        begun = self._streams.begin(outbox.job_id, execution, fence, ttl_ms)
        if not isinstance(begun, Begun):
            self._lose(outbox, "ended by another")
            return
        log.warning("stream_lost", job_id=outbox.job_id, attempt=begun.attempt)
        with self._lock:
            outbox.begin_anew(begun.attempt)
            self._wake()

    # Shared by both sides.

    def _ours(self) -> list[Outbox]:
        """Return the jobs that are not lost; under the lock."""
        return [box for box in self._outboxes.values() if not box.is_lost]

    def _abandon(self, outbox: Outbox) -> None:
        with self._lock:
            if outbox.is_lost or self._outboxes.get(outbox.job_id) is not outbox:
                return
            outbox.is_lost = True
            self._pending_bytes -= outbox.pending.nbytes
            outbox.pending.clear()
            self._lock.notify_all()
        self._drop(Drop(outbox.job_id))

    def _set_last(self, job_id: str, event: End | Released) -> None:
        with self._lock:
            outbox = self._outboxes.get(job_id)
            if outbox is not None:
                outbox.last = event
                self._wake()

    def _running(self, outbox: Outbox) -> RunningJob:
        claim = outbox.claim
        worker_id = self._settings.worker_id
        return RunningJob(claim.job_id, claim.queue_name, claim.execution_id, worker_id)

    def _wake(self) -> None:
        self._has_news = True
        self._lock.notify_all()
