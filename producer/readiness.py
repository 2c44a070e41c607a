"""Waiting until a worker serves an alias, also before its server is there."""

import time
from collections.abc import Callable
from typing import Final

from headwater.schemas.job import Name
from pydantic import TypeAdapter, ValidationError
from redis import Redis
from redis.exceptions import RedisError

from .connection import check_url, explain, is_refused_login, resolve_url
from .errors import InvalidRequest, NoWorker, ServerUnavailable
from .patience import is_passing
from .status import LiveWorker, read_workers

_ALIAS: Final[TypeAdapter[str]] = TypeAdapter(Name)
_POLL_S: Final = 0.25
_LOOK_AT: Final = "look at the last lines of `headwater worker`, and at `headwater doctor`"


def wait_for_worker(
    url: str | None,
    model: str,
    timeout_s: float,
    pause: Callable[[float], object] = time.sleep,
) -> LiveWorker:
    """Return a worker that serves *model*, as soon as one takes jobs.

    *url* as for `connect`. Raises NoWorker after *timeout_s*. What waiting does not mend is told
    at once: InvalidRequest for a name that no alias can have, ServerUnavailable for a URL that is
    none or a login that is refused, RedisError for missing rights.
    """
    _check_alias(model)
    if url is not None:
        check_url(url)
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            return _find_worker(url, model)
        except NoWorker as error:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                waited = f"no worker serves {model!r} after {timeout_s:g} s"
                raise NoWorker(f"{waited} ({error}): {_LOOK_AT}") from error
        pause(min(_POLL_S, left_s))


def _check_alias(model: str) -> None:
    try:
        _ALIAS.validate_python(model)
    except ValidationError as error:
        advice = "give what `headwater worker --alias` says, or `headwater status` shows"
        raise InvalidRequest(f"{model!r} is no alias: {advice}") from error


def _find_worker(url: str | None, model: str) -> LiveWorker:
    """Return a worker that serves *model* now; raises NoWorker, which says what is missing."""
    workers = _workers_now(url)
    serving = [worker for worker in workers if worker.status.alias == model]
    if not serving:
        others = sorted({worker.status.alias for worker in workers})
        raise NoWorker(f"workers serve: {', '.join(others)}" if others else "no worker is alive")
    for worker in serving:
        if not worker.status.draining:
            return worker
    raise NoWorker("the one that serves it is about to leave")


def _workers_now(url: str | None) -> list[LiveWorker]:
    try:
        # Anew each time: the embedded server's address is not known before it is there.
        address = resolve_url(url)
    except ServerUnavailable as error:
        raise NoWorker(str(error)) from error
    with Redis.from_url(address) as client:
        try:
            return read_workers(client)
        except RedisError as error:
            if is_refused_login(error):
                raise ServerUnavailable(explain(error, address)) from error
            if is_passing(error):
                raise NoWorker(explain(error, address)) from error
            raise
