"""The worker's Redis clients: one connection a thread, nothing resent behind our back."""

from redis import Redis
from redis.backoff import NoBackoff
from redis.exceptions import (
    BusyLoadingError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisError,
    ResponseError,
)
from redis.exceptions import (
    ConnectionError as RedisConnectionError,
)
from redis.exceptions import (
    TimeoutError as RedisTimeoutError,
)
from redis.retry import Retry

_SOCKET_TIMEOUT_S = 5.0

_PASSING_ERRORS = (
    RedisConnectionError,
    RedisTimeoutError,
    BusyLoadingError,
    ReadOnlyError,
    OutOfMemoryError,
)
_PASSING_CODES = ("MISCONF", "TRYAGAIN", "CLUSTERDOWN", "MASTERDOWN", "NOREPLICAS", "LOADING")


def connect(url: str) -> Redis:
    """Return a client with a connection of its own.

    redis-py's default resends a command up to ten times when its reply is lost; what is not
    idempotent would run twice. Callers repeat what they know to be safe.
    """
    return Redis.from_url(
        url,
        retry=Retry(NoBackoff(), 0),
        socket_timeout=_SOCKET_TIMEOUT_S,
        socket_connect_timeout=_SOCKET_TIMEOUT_S,
        socket_keepalive=True,
        health_check_interval=30,
    )


def is_passing(error: RedisError) -> bool:
    """Whether the same command may succeed later: an outage, not a fault of ours."""
    if isinstance(error, _PASSING_ERRORS):
        return True
    return isinstance(error, ResponseError) and str(error).startswith(_PASSING_CODES)
