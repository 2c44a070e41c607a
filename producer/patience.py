"""Patience: waiting for a server that is away for a moment, where a call may be sent again."""

import random
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self, TypeVar

from redis.exceptions import (
    AuthenticationError,
    BusyLoadingError,
    ConnectionError,  # noqa: A004  (redis' own, which the built-in one is not)
    ReadOnlyError,
    RedisError,
    TimeoutError,  # noqa: A004
    WatchError,
)

T = TypeVar("T")

OUTAGE_S = 5.0
"""How long a call waits for the server: a restart and most fail-overs are shorter."""
_PASSING = (ConnectionError, TimeoutError, BusyLoadingError, ReadOnlyError)
_FIRST_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 1.0


class Patience:
    """For one call that may be repeated; `with` it around each try, in a loop.

    Passes over WatchError at once (somebody was quicker: look again), and after a pause over an
    error that a restart or a fail-over brings, while the patience lasts. What the body does must
    come to the same when it is done twice: the reply to the first may have been lost.
    """

    def __init__(
        self, outage_s: float = OUTAGE_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._outage_s = outage_s
        self._clock = clock
        self._failing_since: float | None = None
        self._pause_s = _FIRST_PAUSE_S

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool:
        if isinstance(error, WatchError):
            return True
        if not isinstance(error, RedisError) or not is_passing(error):
            return False
        return self._waits()

    def _waits(self) -> bool:
        """Wait before the next try; False where there is to be none."""
        now = self._clock()
        if self._failing_since is None:
            self._failing_since = now
        pause_s = jittered(self._pause_s)
        if now + pause_s - self._failing_since > self._outage_s:
            return False
        time.sleep(pause_s)
        self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)
        return True


def insist(action: Callable[[], T], outage_s: float = OUTAGE_S) -> T:
    """Return what *action* returns, which may be repeated; see Patience."""
    patience = Patience(outage_s)
    while True:
        with patience:
            return action()


def is_passing(error: RedisError) -> bool:
    """Whether the same call may soon succeed, and may not have been carried out so far."""
    # A refused login is a broken connection by its class only.
    return isinstance(error, _PASSING) and not isinstance(error, AuthenticationError)


def jittered(pause_s: float) -> float:
    """Return about *pause_s*: many callers must not come back at one moment."""
    return pause_s * random.uniform(0.5, 1.5)  # noqa: S311 - no secret
