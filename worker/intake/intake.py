"""The intake thread: claims jobs while there is room, and looks for wishes to cancel."""

import threading
import time
from collections.abc import Callable
from typing import Protocol

import structlog
from headwater.schemas import End
from redis import Redis
from redis.exceptions import RedisError

from ..booking.rq_jobs import RQBook
from ..messages import Admit, Cancel, Claim, Message
from ..outages import Outages
from ..watched_thread import WatchedThread
from .claimer import Claimer, ClaimPostponed
from .fair_share import FairShare, QueueId
from .lookout import Lookout
from .settings import IntakeSettings

log = structlog.get_logger()

_SHORTEST_PAUSE_S = 0.02
"""Between two looks, also when the bell never stops or the steps are short."""
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
        step_s: Callable[[], float],
        hears_bell: Callable[[], bool],
        on_death: Callable[[BaseException], None],
        on_end: Callable[[End], None] = lambda _: None,
        outages: Outages | None = None,
    ) -> None:
        """*step_s* tells how long the engine's last step took; 0 before the first one.

        *hears_bell* tells whether `ring` is called when there is something to look at. *on_end*
        is told of jobs that end at their claim.
        """
        self._claims = claims
        self._settings = settings
        self._post = post
        self._claimer = Claimer(redis, book, settings, is_held=claims.holds, on_end=on_end)
        self._lookout = Lookout(redis, settings.model)
        self._step_s = step_s
        self._hears_bell = hears_bell
        self._share = FairShare(settings.max_wait_s)
        self._cancels_due_s = 0.0
        self._asked: set[str] = set()
        """Jobs whose cancellation the engine has been told of."""
        self._drain = threading.Event()
        self._bell = threading.Event()
        self._outages = outages or Outages()
        self._thread = WatchedThread("intake", self._run, on_death)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def drain(self) -> None:
        """Claim nothing more, and hand back what is just being claimed.

        Wishes to cancel are still looked for.
        """
        self._drain.set()

    def ring(self) -> None:
        """Look soon: something was submitted, or somebody wants a job to end."""
        self._bell.set()

    def stop(self) -> None:
        """End the thread."""
        self._thread.stopping.set()
        self._bell.set()
        self._thread.stop()

    def _run(self) -> None:
        while not self._thread.stopping.is_set():
            self._turn()

    def _turn(self) -> None:
        try:
            self._claimer.resume(self._accept)
            waiting = self._look()
            has_claimed = self._claim_next(waiting)
        except RedisError as error:
            self._outages.note("intake_paused", error)
            self._thread.stopping.wait(_OUTAGE_PAUSE_S)
            return
        if not has_claimed:
            self._pause(is_empty=not waiting)

    def _pause(self, *, is_empty: bool) -> None:
        """Wait for the bell, or for the next look.

        A look takes a core from the engine for some milliseconds, caches and all, so there are
        few while the bell is heard and the queues are empty. Else there is one a step, as nothing
        that it brings can be acted on within a step.
        """
        longest_s = self._settings.longest_pause_s
        pause_s = min(max(self._step_s() or longest_s, _SHORTEST_PAUSE_S), longest_s)
        if is_empty and self._hears_bell():
            pause_s = self._settings.longest_trust_s
        began_s = time.monotonic()
        if self._bell.wait(pause_s):
            self._bell.clear()
            rest_s = _SHORTEST_PAUSE_S - (time.monotonic() - began_s)
            if rest_s > 0:
                self._thread.stopping.wait(rest_s)

    def _look(self) -> list[QueueId]:
        """Tell the engine of wishes to cancel; return the queues that hold something."""
        now = time.monotonic()
        watched: list[Claim] = []
        if now >= self._cancels_due_s:
            # Less than the pause, so that every wake-up looks, and not every claim of a burst.
            self._cancels_due_s = now + _SHORTEST_PAUSE_S / 2
            claims = self._claims.open_claims()
            self._asked &= {claim.job_id for claim in claims}
            watched = [claim for claim in claims if claim.job_id not in self._asked]
        sight = self._lookout.look(watched)
        for job_id in sight.ending:
            self._asked.add(job_id)
            self._post(Cancel(job_id))
        return sight.waiting

    def _claim_next(self, waiting: list[QueueId]) -> bool:
        """Claim one job if there is room and work; return whether to go on at once.

        A job with strikes is on trial until its first token. Only it may be struck if the
        process dies: it waits until all others have told something, and none comes after it.
        """
        if self._drain.is_set() or self._claims.num_open >= self._settings.max_claims:
            return False
        silent = self._claims.silent_claims()
        if any(claim.strikes for claim in silent):
            return False
        for queue in self._share.order(waiting, time.monotonic()):
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
