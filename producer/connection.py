"""Connecting to the server, with errors that say what to do."""

from collections.abc import Callable
from typing import TypeVar
from urllib.parse import urlsplit, urlunsplit

from redis import Redis
from redis.exceptions import AuthenticationError, BusyLoadingError, RedisError

from .errors import ServerUnavailable
from .patience import OUTAGE_S, insist, is_passing

T = TypeVar("T")

_SCHEMES = ("redis", "rediss", "unix")


def connect(url: str | None = None, outage_s: float | None = None) -> Redis:
    """Return a client of the server at *url* that has answered a PING.

    Without *url*: the embedded server that a worker or demo of this user has running. Waits
    *outage_s*, or OUTAGE_S, for one that is away or loads its data. Raises ServerUnavailable.
    """
    url = resolve_url(url)
    check_url(url)
    client = Redis.from_url(url)
    try:
        insist(client.ping, OUTAGE_S if outage_s is None else outage_s)
    except (RedisError, OSError) as error:
        client.close()
        raise ServerUnavailable(explain(error, url)) from error
    return client


def look(url: str | None, read: Callable[[Redis], T]) -> T:
    """Return what *read*, which may be repeated, makes of the server at *url*; see connect.

    Waits OUTAGE_S for a server that goes away in the middle of it. Raises ServerUnavailable, and
    RedisError for what no waiting mends.
    """
    url = resolve_url(url)
    with connect(url) as client:
        try:
            return insist(lambda: read(client), OUTAGE_S)
        except RedisError as error:
            if is_passing(error):
                raise ServerUnavailable(explain(error, url)) from error
            raise


def check_url(url: str) -> None:
    """Raise ServerUnavailable where no client could be made of *url*; connects to nothing."""
    shown = hide_password(url)
    if urlsplit(url).scheme not in _SCHEMES:
        raise ServerUnavailable(
            f"not a Redis URL: {shown!r}; expected redis://, rediss:// or unix://"
        )
    try:
        Redis.from_url(url).close()
    except ValueError as error:
        raise ServerUnavailable(f"not a Redis URL: {shown!r} ({error})") from error


def explain(error: Exception, url: str) -> str:
    """Return one line that says what *error* means for the server at *url*."""
    shown = hide_password(url)
    if is_refused_login(error):
        return f"{shown} refuses the login ({error}): give redis://USER:PASSWORD@HOST:PORT/DB"
    if isinstance(error, BusyLoadingError):
        return f"{shown} is still loading its data: try again when it is done"
    return f"no answer from {shown} ({error}): is the server running?"


def is_refused_login(error: Exception) -> bool:
    """Whether the server wants another user name or password."""
    # A missing password is a plain response error on some servers.
    return isinstance(error, AuthenticationError) or str(error).startswith(("NOAUTH", "WRONGPASS"))


def hide_password(url: str) -> str:
    """Return *url* in a form that may be printed."""
    parts = urlsplit(url)
    if "@" not in parts.netloc:
        return url
    _, _, host = parts.netloc.rpartition("@")
    return urlunsplit(parts._replace(netloc=f"***@{host}"))


def resolve_url(url: str | None) -> str:
    """Return *url*, or the one of this user's running embedded server; ServerUnavailable."""
    if url is not None:
        return url
    # Only here: whoever gives a URL needs nothing of the embedded server.
    from .embedded import running_url

    running = running_url()
    if running is None:
        raise ServerUnavailable("no server: start `headwater worker` first or give --redis URL")
    return running
