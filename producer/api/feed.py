"""Feed: the items of one or several jobs as they come, for one client."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import NamedTuple

from headwater.schemas import HeadwaterError

from ..stream_reader import Ended, TailItem

_CLOSE_AGAIN_S = 1.0
_AHEAD = 64
"""Items read before the client has taken them."""


class FeedItem(NamedTuple):
    """An item, and which of the feed's jobs it belongs to."""

    job: int
    item: TailItem


class Stopped(Exception):
    """The server stops: the client may come back to another one and read on."""


class Feed:
    """Reads tails on tasks of their own, so that a client that leaves interrupts no read."""

    def __init__(self, tails: Sequence[AsyncGenerator[TailItem, None]]) -> None:
        """Start to read *tails*; only on a running event loop."""
        self._queue: asyncio.Queue[FeedItem | HeadwaterError | Stopped] = asyncio.Queue(_AHEAD)
        self._tasks = [
            asyncio.create_task(self._read(number, tail)) for number, tail in enumerate(tails)
        ]
        self._reading = set(self._tasks)
        self._is_closed = False

    async def next(self, timeout_s: float) -> FeedItem | None:
        """Return the next item, or None after *timeout_s* without one.

        Not to be called again once every job's end came. Raises Stopped and what the tails raise.
        """
        try:
            async with asyncio.timeout(timeout_s):
                found = await self._queue.get()
        except TimeoutError:
            return None
        if isinstance(found, Exception):
            raise found
        return found

    def stop(self) -> None:
        """Make next() raise Stopped, whatever has not been taken."""
        self.close()
        while not self._queue.empty():
            self._queue.get_nowait()
        self._queue.put_nowait(Stopped())

    def close(self) -> None:
        """Let go of the tails; harmless when repeated."""
        self._is_closed = True
        # A tail that is closing its connection already must not be disturbed in it.
        for task in self._reading:
            task.cancel()

    async def closed(self) -> None:
        """Wait until the tails' connections are given back."""
        pending = set(self._tasks)
        while pending:
            _, pending = await asyncio.wait(pending, timeout=_CLOSE_AGAIN_S)
            # Seen with redis-py 8.1: a read that is cancelled while its reply arrives goes on.
            self.close()

    async def _read(self, number: int, tail: AsyncGenerator[TailItem, None]) -> None:
        async with aclosing(tail):
            try:
                async for item in tail:
                    if self._is_closed:
                        return
                    await self._queue.put(FeedItem(number, item))
                    if isinstance(item, Ended):
                        self._reading.discard(self._tasks[number])
            except HeadwaterError as error:
                await self._queue.put(error)
            finally:
                self._reading.discard(self._tasks[number])
