"""BatchRun: one batch from its input file to its output files, on a task of the server."""

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import structlog

from ..openai_protocol.errors import ApiError
from .batch import Batch, BatchStatus, Counts
from .batch_row_run import RowRunner
from .batch_rows import Row, RowFile, read_rows, row_id
from .file_store import FileStore
from .services import Services

log = structlog.get_logger()

MAX_ROWS = 50_000
_SHOWN_ERRORS = 20


class BatchRun:
    """Drives one batch. What it has done lies on disk, so that another process can go on."""

    def __init__(
        self,
        services: Services,
        files: FileStore,
        batch: Batch,
        directory: Path,
        save: Callable[[Batch], None],
    ) -> None:
        self.batch = batch
        self._settings = services.settings
        self._files = files
        self._directory = directory
        self._save = save
        self._rows = RowRunner(services, batch.endpoint, batch.caller, batch.expires_at)
        if batch.is_cancelled:
            self._rows.cancel()

    async def run(self) -> None:
        """Work until the batch has ended."""
        if self.batch.status is BatchStatus.VALIDATING:
            await self._validate()
        if self.batch.status in (BatchStatus.IN_PROGRESS, BatchStatus.CANCELLING):
            await self._run_rows()
        if self.batch.status is BatchStatus.FINALIZING:
            await asyncio.to_thread(self._finalize)
        log.info("batch_ended", batch_id=self.batch.id, status=self.batch.status.value)

    def cancel(self) -> None:
        """Run no more rows; those that have finished keep their results. Harmless when repeated."""
        if not self.batch.is_cancelled and self.batch.status is not BatchStatus.FINALIZING:
            self._enter(BatchStatus.CANCELLING, is_cancelled=True)
            self._rows.cancel()

    async def _validate(self) -> None:
        total, errors = await asyncio.to_thread(self._count_rows)
        if errors:
            self._enter(BatchStatus.FAILED, errors=errors, counts=Counts(total=total))
        elif self.batch.is_cancelled:
            self._change(counts=Counts(total=total))
        else:
            self._enter(BatchStatus.IN_PROGRESS, counts=Counts(total=total))

    def _count_rows(self) -> tuple[int, tuple[str, ...]]:
        """Return the number of rows, and why the batch can't run at all."""
        total, num_good = 0, 0
        errors: list[str] = []
        try:
            for row in self._read():
                total += 1
                if row.error is None:
                    num_good += 1
                elif len(errors) < _SHOWN_ERRORS:
                    errors.append(str(row.error))
        except (ApiError, OSError) as error:
            return 0, (f"the input file can't be read: {error}",)
        if total > MAX_ROWS:
            return total, (f"the file has {total} rows; at most {MAX_ROWS}",)
        if not num_good:
            return total, tuple(errors) or ("the file has no rows",)
        return total, ()

    async def _run_rows(self) -> None:
        slots = asyncio.Semaphore(self._settings.batch_rows_in_flight)
        with (
            closing(RowFile(self._part("output"))) as output,
            closing(RowFile(self._part("error"))) as errors,
        ):
            done = output.lines | errors.lines
            self._count(output, errors)
            rows = self._read()
            async with asyncio.TaskGroup() as group:
                while (row := await asyncio.to_thread(next, rows, None)) is not None:
                    if row.line not in done:
                        await slots.acquire()
                        task = group.create_task(self._run_row(row, output, errors))
                        task.add_done_callback(lambda _: slots.release())
        self._enter(BatchStatus.FINALIZING, has_expired=self._rows.has_expired)

    async def _run_row(self, row: Row, output: RowFile, errors: RowFile) -> None:
        own_id = row_id(self.batch.id, row.line)
        outcome = await self._rows.run(row, own_id)
        record = {"id": own_id, "custom_id": row.custom_id, **outcome._asdict()}
        # At once and without a pause before the count: a row not in its file is run again.
        (output if outcome.is_good else errors).add(row.line, record)
        self._count(output, errors)

    def _finalize(self) -> None:
        ids: dict[str, Any] = {}
        for kind in ("output", "error"):
            file_id = f"file-{self.batch.id}_{kind}"
            name = f"{self.batch.id}_{kind}.jsonl"
            namespace = self.batch.caller.namespace
            part = self._part(kind)
            if self._files.adopt(part, file_id, filename=name, namespace=namespace):
                ids[f"{kind}_file_id"] = file_id
        ended = BatchStatus.EXPIRED if self.batch.has_expired else BatchStatus.COMPLETED
        self._enter(BatchStatus.CANCELLED if self.batch.is_cancelled else ended, **ids)

    def _count(self, output: RowFile, errors: RowFile) -> None:
        counts = {"completed": len(output.lines), "failed": len(errors.lines)}
        # Not saved: the files say it again.
        self.batch = self.batch.model_copy(
            update={"counts": self.batch.counts.model_copy(update=counts)}
        )

    def _read(self) -> Iterator[Row]:
        note = self._files.get(self.batch.input_file_id, None)
        max_row_bytes = self._settings.max_body_mb * 1024 * 1024
        return read_rows(self._files.path(note), self.batch.endpoint, max_row_bytes)

    def _part(self, kind: str) -> Path:
        return self._directory / f"{self.batch.id}.{kind}"

    def _enter(self, status: BatchStatus, **changes: Any) -> None:
        self.batch = self.batch.now_in(status, int(time.time()), **changes)
        self._save(self.batch)

    def _change(self, **changes: Any) -> None:
        self.batch = self.batch.model_copy(update=changes)
        self._save(self.batch)
