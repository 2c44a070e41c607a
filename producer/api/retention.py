"""Retention: files and ended batches go when they are old enough."""

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Final

import structlog

from .batch_runner import BatchRunner

log = structlog.get_logger()

_EVERY_S: Final = 3600.0


class Retention:
    """Sweeps a server's directory now and then, on a task of the event loop."""

    def __init__(
        self,
        batches: BatchRunner,
        retention_s: float | None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """*retention_s* None keeps everything. *clock* tells Unix seconds."""
        self._batches = batches
        self._retention_s = retention_s
        self._clock = clock
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Sweep now, and from time to time."""
        if self._retention_s is not None:
            self._task = asyncio.get_running_loop().create_task(self._run(self._retention_s))

    async def stop(self) -> None:
        """End the task."""
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task

    async def sweep(self, retention_s: float) -> int:
        """Delete what is older than *retention_s*; return the number of files."""
        limit = self._clock() - retention_s
        self._batches.forget_ended(limit)
        files = self._batches.files
        old = [note for note in await asyncio.to_thread(files.all, None) if note.created_at < limit]
        # On the loop from here: a batch that begins now must not lose its file in between.
        unread = [note for note in old if not self._batches.reads(note.id)]
        for note in unread:
            files.delete(note)
        num_leftovers = await asyncio.to_thread(files.delete_leftovers, limit)
        return len(unread) + num_leftovers

    async def _run(self, retention_s: float) -> None:
        while True:
            try:
                if num_files := await self.sweep(retention_s):
                    log.info("files_deleted", files=num_files, older_than_s=retention_s)
            except OSError as error:
                log.warning("retention_failed", error=str(error))
            await asyncio.sleep(_EVERY_S)
