"""The intake thread: claims jobs while there is room, and looks for wishes to cancel."""

import threading
import time
from collections.abc import Callable
from typing import Protocol

import structlog
from redis import Redis
from redis.exceptions import RedisError

from ..booking.rq_jobs import RQBook
from ..messages import Admit, Cancel, Claim, Message
from ..redis_client import is_passing
from ..watched_thread import WatchedThread
from .cancel_watch import CancelWatch
from .claimer import Claimer, ClaimPostponed
from .fair_share import FairShare
from .queue_watch import QueueWatch
from .settings import IntakeSettings

log = structlog.get_logger()

_BUSY_POLL_S = 0.05
"""Pause between two looks while jobs run."""
_OUTAGE_PAUSE_S = 0.5


class ClaimTable(Protocol):
    """The jobs whose last entry is not written; the publisher keeps it."""

    @property
    def num_open(self) -> int:
        """Jobs that are not done with."""
        ...

    def open(self, claim: Claim) -> None:
        """Take a job in."""
        ...

    def release(self, job_id: str, reason: str) -> None:
        """Hand a job back to its queue."""
        ...

    def open_claims(self) -> list[Claim]:
        """Return the claims that still run."""
        ...

    def silent_claims(self) -> list[Claim]:
        """Return the claims that this process' death would count against."""
        ...

    def holds(self, job_id: str) -> bool:
        """Whether a job is still in the engine's hands, ours or lost."""
        ...


class Intake:
    """Fills the engine's inbox."""

    def __init__(
        self,
        redis: Redis,
        book: RQBook,
        claims: ClaimTable,
        settings: IntakeSettings,
        *,
        post: Callable[[Message], None],
        on_death: Callable[[BaseException], None],
    ) -> None:
        self._claims = claims
        self._settings = settings
        self._post = post
        self._claimer = Claimer(redis, book, settings, is_held=claims.holds)
        self._cancel_watch = CancelWatch(redis)
        self._queue_watch = QueueWatch(redis, settings.model)
        self._share = FairShare(settings.max_wait_s)
        self._next_look_s = 0.0
        self._asked: set[str] = set()
        """Jobs whose cancellation the engine has been told of."""
        self._drain = threading.Event()
        self._thread = WatchedThread("intake", self._run, on_death)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def drain(self) -> None:
        """Claim nothing more, and hand back what is just being claimed.

        Wishes to cancel are still looked for.
        """
        self._drain.set()

    def stop(self) -> None:
        """End the thread."""
        self._thread.stop()

    def _run(self) -> None:
        while not self._thread.stopping.is_set():
            self._turn()

    def _turn(self) -> None:
        try:
            self._look_for_cancels()
            self._claimer.resume(self._accept)
            has_claimed = self._claim_next()
        except RedisError as error:
            if not is_passing(error):
                raise
            log.warning("intake_paused", error=str(error))
            self._thread.stopping.wait(_OUTAGE_PAUSE_S)
            return
        if not has_claimed:
            self._thread.stopping.wait(self._pause_s())

    def _pause_s(self) -> float:
        """Return how long to wait before the next look.

        Every wake-up takes a core from the engine for about a millisecond, caches and all, so
        while jobs run there is one for both looks.
        """
        return _BUSY_POLL_S if self._claims.num_open else self._settings.poll_s

    def _claim_next(self) -> bool:
        """Claim one job if there is room and work; return whether to go on at once.

        A job with strikes is on trial until its first token. Only it may be struck if the
        process dies: it waits until all others have told something, and none comes after it.
        """
        if self._drain.is_set() or self._claims.num_open >= self._settings.max_claims:
            return False
        silent = self._claims.silent_claims()
        if any(claim.strikes for claim in silent):
            return False
        now = time.monotonic()
        for queue in self._share.order(self._queue_watch.waiting(), now):
            try:
                num_tokens = self._claimer.claim(queue.name, self._accept, with_strikes=not silent)
            except ClaimPostponed:
                return False
            if num_tokens is not None:
                self._share.claimed(queue, num_tokens)
                return True
        return False

    def _accept(self, claim: Claim) -> None:
        # Before the engine hears of it: its first event may come at once.
        self._claims.open(claim)
        if self._drain.is_set():
            self._claims.release(claim.job_id, "the worker stops")
        else:
            self._post(Admit(claim))

    def _look_for_cancels(self) -> None:
        now = time.monotonic()
        if now < self._next_look_s:
            return
        # Less than the pause, so that every wake-up looks, and not every claim of a burst.
        self._next_look_s = now + _BUSY_POLL_S / 2
        claims = self._claims.open_claims()
        self._asked &= {claim.job_id for claim in claims}
        watched = [claim for claim in claims if claim.job_id not in self._asked]
        for job_id in self._cancel_watch.cancelled(watched):
            self._asked.add(job_id)
            self._post(Cancel(job_id))
