"""Outages: what a worker's threads do about errors of the server, which mostly pass."""

import threading
import time
from collections.abc import Callable
from typing import Any

import structlog
from redis.exceptions import AuthenticationError, AuthorizationError, RedisError

from .errors import LoginRefused
from .redis_client import is_passing

log = structlog.get_logger()

_ONE_REFUSAL_S = 30.0
"""Refusals that are less apart belong together: every thread tries again within seconds."""


class Outages:
    """One for all threads of a worker: what each of them was told by the server.

    A login that is refused to a running worker (its password was changed) may be an operator's
    slip, so it is waited for, and said once; but it does not pass by itself.
    """

    def __init__(
        self, login_patience_s: float = 60.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._login_patience_s = login_patience_s
        self._clock = clock
        self._lock = threading.Lock()
        self._refused_since = 0.0
        self._last_refused: float | None = None

    def note(self, event: str, error: RedisError, **facts: Any) -> None:
        """Log a passing *error* as *event*, with *facts*, for the caller to try again later.

        Raises *error* itself where it does not pass, LoginRefused at the end of the patience.
        """
        if not is_passing(error):
            raise error
        if isinstance(error, AuthenticationError | AuthorizationError):
            self._note_refusal(error)
        else:
            log.warning(event, error=str(error), **facts)

    def _note_refusal(self, error: RedisError) -> None:
        with self._lock:
            now = self._clock()
            if self._last_refused is None or now - self._last_refused > _ONE_REFUSAL_S:
                self._refused_since = now
                log.warning("login_refused", error=str(error), patience_s=self._login_patience_s)
            self._last_refused = now
            refused_s = now - self._refused_since
        if refused_s >= self._login_patience_s:
            raise LoginRefused(
                f"the server has refused our login for {refused_s:.0f} s ({error}): start the"
                " worker again with the password that holds now; its jobs go on elsewhere when"
                " its lease has lapsed"
            ) from error
