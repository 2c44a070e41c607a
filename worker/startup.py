"""A worker's patience at its start: it may be up before its server is."""

import random
import ssl
import time
from collections.abc import Callable, Iterator

import structlog
from redis import Redis
from redis.exceptions import AuthenticationError, AuthorizationError, RedisError

from .errors import StartupError
from .redis_client import is_passing

log = structlog.get_logger()

_FIRST_PAUSE_S = 0.25
_LONGEST_PAUSE_S = 5.0


class Patience:
    """Repeats what needs the server while it is away, loading, or takes no writes."""

    def __init__(
        self, redis: Redis, timeout_s: float, *, goes_on_after: Callable[[float], bool]
    ) -> None:
        """*goes_on_after* waits so many seconds; False when the worker should end instead."""
        self._address = address_of(redis)
        self._timeout_s = timeout_s
        self._goes_on_after = goes_on_after

    def insist(self, action: Callable[[], object]) -> bool:
        """Do *action*, which may be repeated, until it succeeds; False where told to end.

        Raises StartupError at once for what waiting does not mend, and at the end of patience.
        """
        deadline = time.monotonic() + self._timeout_s
        for pause_s in _pauses():
            try:
                action()
            except RedisError as error:
                if not is_worth_waiting(error):
                    raise StartupError(f"{self._address} refuses us: {error}") from error
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    raise StartupError(self._complaint(error)) from error
                pause_s = min(pause_s, left_s)
                log.warning("waiting_for_redis", error=str(error), pause_s=round(pause_s, 2))
                if not self._goes_on_after(pause_s):
                    return False
            else:
                break
        return True

    def _complaint(self, error: RedisError) -> str:
        waited = f"no usable answer from {self._address} for {self._timeout_s:g} s ({error})"
        return f"{waited}: is the server running? HEADWATER_CONNECT_TIMEOUT_S sets the patience"


def is_worth_waiting(error: RedisError) -> bool:
    """Whether a server that gave *error* may soon serve us: down or busy, not another kind."""
    if isinstance(error, AuthenticationError | AuthorizationError):
        return False
    # TLS towards a server of another kind, or with a certificate that we don't trust.
    return is_passing(error) and not isinstance(error.__context__, ssl.SSLError)


def address_of(redis: Redis) -> str:
    """Return where *redis* connects to, without its password."""
    options = redis.connection_pool.connection_kwargs
    if "path" in options:
        return str(options["path"])
    return f"{options.get('host', 'localhost')}:{options.get('port', 6379)}"


def _pauses() -> Iterator[float]:
    """Yield ever longer pauses, in seconds, jittered: many workers start at one moment."""
    pause_s = _FIRST_PAUSE_S
    while True:
        yield pause_s * random.uniform(0.5, 1.5)  # noqa: S311 - no secret
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
