"""Server-sent events: their bytes, and the response that carries them."""

from collections.abc import AsyncIterator, Callable
from typing import Any, Final

import orjson
from headwater.schemas import EntryId
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

KEEP_ALIVE: Final = b": keep-alive\n\n"
DONE: Final = b"data: [DONE]\n\n"

_HEADERS: Final = {
    "Cache-Control": "no-cache",
    # nginx would hold the events back to fill a buffer.
    "X-Accel-Buffering": "no",
}


def event(data: Any, *, name: str | None = None, entry_id: EntryId | None = None) -> bytes:
    """Return one event; a client that was cut off resumes after the last *entry_id* it saw."""
    lines = [f"id: {entry_id}\n"] if entry_id is not None else []
    if name is not None:
        lines.append(f"event: {name}\n")
    # JSON holds no line break, so one data line is enough.
    return "".join(lines).encode() + b"data: " + orjson.dumps(data) + b"\n\n"


class EventStream(StreamingResponse):
    """A response of events; *on_close* runs whether it was sent or the client left."""

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncIterator[bytes],
        headers: dict[str, str],
        on_close: Callable[[], None],
    ) -> None:
        super().__init__(events, headers={**_HEADERS, **headers})
        self._on_close = on_close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._on_close()
