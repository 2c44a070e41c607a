"""What happens around every request: a limit on its body, a log line, figures."""

import time
from typing import Any

import structlog
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .metrics import ApiMetrics

log = structlog.get_logger()

_QUIET = ("/healthz", "/readyz", "/metrics")
"""Asked for every few seconds by machines: no news."""


class BodyLimit:
    """Refuses bodies above a size, by their announced length or once they grow too long."""

    def __init__(self, app: ASGIApp, max_bytes: int, max_file_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self._max_file_bytes = max_file_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, counting what is received."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        is_file = scope["path"].rstrip("/") == "/v1/files"
        limit = self._max_file_bytes if is_file else self._max_bytes
        announced = dict(scope["headers"]).get(b"content-length", b"")
        num_received = 0

        async def limited() -> Message:
            nonlocal num_received
            if announced.isdigit() and int(announced) > limit:
                raise _too_large(limit)
            message = await receive()
            num_received += len(message.get("body", b""))
            if num_received > limit:
                raise _too_large(limit)
            return message

        await self._app(scope, limited, send)


class RequestLog:
    """Writes one line a request, without its content, and counts it."""

    def __init__(self, app: ASGIApp, metrics: ApiMetrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on and note what became of it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begun_s = time.monotonic()
        status = 500

        async def noting(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, noting)
        finally:
            self._note(scope, status, time.monotonic() - begun_s)

    def _note(self, scope: Scope, status: int, seconds: float) -> None:
        # The template, not the path: ids would make a series of figures each.
        route = getattr(scope.get("route"), "path", "unmatched")
        self._metrics.requests.labels(route, scope["method"], status).inc()
        self._metrics.seconds.labels(route).observe(seconds)
        if route in _QUIET:
            return
        state: dict[str, Any] = scope.get("state", {})
        facts = {name: state[name] for name in ("caller", "job_ids") if name in state}
        log.info(
            "request",
            route=route,
            method=scope["method"],
            status=status,
            seconds=round(seconds, 3),
            **facts,
        )


def _too_large(limit: int) -> HTTPException:
    return HTTPException(413, f"the request's body is over {limit} bytes")
