"""The worker's Redis clients: one connection a thread, nothing resent behind our back."""

import re

from redis import Redis
from redis.backoff import NoBackoff
from redis.exceptions import (
    BusyLoadingError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisError,
    ResponseError,
    WatchError,
)
from redis.exceptions import (
    ConnectionError as RedisConnectionError,
)
from redis.exceptions import (
    TimeoutError as RedisTimeoutError,
)
from redis.retry import Retry

_SOCKET_TIMEOUT_S = 5.0


class TakesNoWrites(RedisError):
    """The server answers, and refuses what changes anything: full, loading, or a replica."""


_PASSING_ERRORS = (
    TakesNoWrites,
    RedisConnectionError,
    RedisTimeoutError,
    BusyLoadingError,
    ReadOnlyError,
    OutOfMemoryError,
    # redis-py's word for a connection that broke while it watched something, too.
    WatchError,
)
_BEFORE_SERVERS_WORDS = "of pipeline caused error: "
_PASSING_CODES = re.compile(
    r"\b(MISCONF|TRYAGAIN|CLUSTERDOWN|MASTERDOWN|NOREPLICAS|LOADING|READONLY|OOM|BUSY)\b"
)


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
    # In a pipeline the client writes the command before the server's words; it may hold anything.
    said = str(error).rpartition(_BEFORE_SERVERS_WORDS)[2]
    return isinstance(error, ResponseError) and bool(_PASSING_CODES.search(said))
