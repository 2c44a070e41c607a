"""BatchRunner: all batches of a server, those of an earlier process among them."""

import asyncio
import fcntl
import time
from contextlib import suppress
from pathlib import Path
from typing import IO

import structlog
from headwater.schemas import SchemaError

from ..errors import ProducerError
from ..openai_protocol.caller import Caller
from ..openai_protocol.errors import ApiError
from ..openai_protocol.routes import ROUTES
from .batch import Batch
from .batch_run import BatchRun
from .file_store import FileStore, write_whole
from .services import Services

log = structlog.get_logger()


class DirectoryInUse(ProducerError):
    """Another server keeps its batches in the directory."""


class BatchRunner:
    """Batches below a directory that belongs to one server at a time."""

    def __init__(self, services: Services, directory: Path) -> None:
        """Take the directory; raises DirectoryInUse and OSError."""
        self._services = services
        self._directory = directory / "batches"
        self._directory.mkdir(parents=True, exist_ok=True)
        self._lock = _hold(directory)
        self.files = FileStore(directory / "files", services.settings.retention_s)
        self._runs = {batch.id: self._run_of(batch) for batch in self._load()}
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def start(self) -> None:
        """Go on with what has not ended."""
        for run in self._runs.values():
            if not run.batch.has_ended:
                self._start(run)

    async def stop(self) -> None:
        """Leave everything as it lies; the next server goes on with it."""
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        self._lock.close()

    def create(
        self, endpoint: str, input_file_id: str, caller: Caller, metadata: dict[str, str] | None
    ) -> Batch:
        """Begin a batch over a file that the caller may read; raises ApiError."""
        if endpoint not in ROUTES:
            known = ", ".join(ROUTES)
            raise ApiError(400, f"endpoint: must be one of {known}", param="endpoint")
        note = self.files.get(input_file_id, None if caller.may_choose else caller.namespace)
        if note.purpose != "batch":
            raise ApiError(400, f"{note.id} was not uploaded for a batch", param="input_file_id")
        batch = Batch.new(endpoint, note.id, caller, int(time.time()), metadata)
        self._save(batch)
        run = self._runs[batch.id] = self._run_of(batch)
        self._start(run)
        return run.batch

    def get(self, batch_id: str, namespace: str | None) -> Batch:
        """Return a batch; raises ApiError 404. *namespace* None sees all."""
        return self._find(batch_id, namespace).batch

    def all(self, namespace: str | None) -> list[Batch]:
        """Return all batches, newest first."""
        batches = (run.batch for run in self._runs.values())
        seen = [batch for batch in batches if namespace in (None, batch.caller.namespace)]
        return sorted(seen, key=lambda batch: (batch.created_at, batch.id), reverse=True)

    def cancel(self, batch_id: str, namespace: str | None) -> Batch:
        """Cancel a batch, which ends a little later; raises ApiError where it has ended."""
        run = self._find(batch_id, namespace)
        if run.batch.has_ended:
            raise ApiError(409, f"{batch_id} is {run.batch.status.value} already")
        run.cancel()
        return run.batch

    def reads(self, file_id: str) -> bool:
        """Whether a batch that has not ended needs the file."""
        return any(
            run.batch.input_file_id == file_id and not run.batch.has_ended
            for run in self._runs.values()
        )

    def forget_ended(self, before_s: float) -> None:
        """Forget the batches that ended before *before_s* (Unix); their files are others' work."""
        for batch in [run.batch for run in self._runs.values()]:
            if batch.ended_at is not None and batch.ended_at < before_s:
                (self._directory / f"{batch.id}.json").unlink(missing_ok=True)
                del self._runs[batch.id]

    def _find(self, batch_id: str, namespace: str | None) -> BatchRun:
        run = self._runs.get(batch_id)
        if run is None or namespace not in (None, run.batch.caller.namespace):
            raise ApiError(404, f"no such batch: {batch_id!r}", code="batch_not_found")
        return run

    def _start(self, run: BatchRun) -> None:
        task = asyncio.get_running_loop().create_task(run.run())
        self._tasks[run.batch.id] = task
        task.add_done_callback(lambda done: self._on_done(run, done))

    def _on_done(self, run: BatchRun, task: asyncio.Task[None]) -> None:
        self._tasks.pop(run.batch.id, None)
        if not task.cancelled() and task.exception() is not None:
            # A bug or a full disk; what is done is on disk and a restart goes on with it.
            log.error("batch_stopped", batch_id=run.batch.id, exc_info=task.exception())

    def _run_of(self, batch: Batch) -> BatchRun:
        return BatchRun(self._services, self.files, batch, self._directory, self._save)

    def _save(self, batch: Batch) -> None:
        write_whole(self._directory / f"{batch.id}.json", batch.encode())

    def _load(self) -> list[Batch]:
        batches = []
        for path in self._directory.glob("*.json"):
            try:
                batches.append(Batch.decode(path.read_bytes()))
            except SchemaError as error:
                log.warning("batch_not_read", path=path.name, error=str(error))
        return batches


def _hold(directory: Path) -> IO[str]:
    """Return the directory's lock, held until it is closed or the process ends."""
    lock = (directory / ".lock").open("w")
    with suppress(BlockingIOError):
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return lock
    lock.close()
    raise DirectoryInUse(f"{directory} is in use by another server: give --data-dir")
