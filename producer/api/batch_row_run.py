"""RowRunner: one row of a batch, from its request to what its record says."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple, TypeVar

from headwater.schemas import (
    Cancelled,
    Expired,
    Failed,
    GenerationJob,
    HeadwaterError,
    Priority,
)
from redis.exceptions import RedisError

from ..client_cancel import CancelOutcome
from ..errors import DuplicateJob, QueueFull, ServerUnavailable, StreamError
from ..openai_protocol.caller import Caller
from ..openai_protocol.errors import ApiError, of_any
from ..openai_protocol.routes import FileRequest, encoding_of, file_jobs, file_reply
from ..result import GenerationResult
from .batch_rows import Row
from .services import Services

_MAX_ATTEMPTS = 3
"""Of a row whose job was lost, or failed for a reason that may pass."""
_PAUSE_S = 1.0
"""Before the next try while the queue is full or Redis is away."""
_FULL = (QueueFull, ServerUnavailable, RedisError)

T = TypeVar("T")


class Outcome(NamedTuple):
    """The fields of a row's record besides its ids: OpenAI's `response` or `error`."""

    response: dict[str, Any] | None
    error: dict[str, Any] | None

    @property
    def is_good(self) -> bool:
        """Whether it belongs into the output file."""
        return self.response is not None and self.response["status_code"] == 200


class BatchOver(Exception):
    """The batch was cancelled or has expired before the row could run."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class RowRunner:
    """Runs rows of one batch, many at once."""

    def __init__(self, services: Services, route: str, caller: Caller, expires_at: int) -> None:
        self.has_expired = False
        """Whether a row could not run any more in time."""
        self._services = services
        self._route = route
        self._caller = caller
        self._expires_at = expires_at
        self._is_cancelled = False
        self._in_flight: set[str] = set()

    def cancel(self) -> None:
        """Run no more rows, and cancel the jobs of those that run."""
        self._is_cancelled = True
        self._services.cancel_later(sorted(self._in_flight))

    async def run(self, row: Row, row_id: str) -> Outcome:
        """Return what the row comes to; a failure is an outcome, too.

        *row_id* is its job's id: a server that was restarted finds the job again.
        """
        try:
            if row.request is None:
                raise row.error or ApiError(400, f"line {row.line} holds no request")
            return await self._run(row.request, row_id)
        except BatchOver as over:
            self.has_expired |= over.code == "batch_expired"
            return Outcome(None, {"code": over.code, "message": str(over)})
        except HeadwaterError as error:
            told = of_any(error)
            return Outcome(_response(told.status, row_id, told.body()), None)

    async def _run(self, request: FileRequest, row_id: str) -> Outcome:
        for attempt in range(_MAX_ATTEMPTS):
            base = f"{row_id}-r{attempt}" if attempt else row_id
            jobs = await self._insist(partial(self._submit, request, base))
            ids = [job.job_id for job in jobs]
            self._in_flight.update(ids)
            try:
                results = await self._insist(partial(self._results, ids))
            except StreamError:
                continue  # lost, or expired while no server read it
            finally:
                self._in_flight.difference_update(ids)
            if not any(isinstance(r.end, Failed) and r.end.retryable for r in results):
                return self._answer(request, jobs, results)
        raise ApiError(500, "the row's job was lost again and again", code="job_lost")

    async def _submit(self, request: FileRequest, base: str) -> list[GenerationJob]:
        jobs = await asyncio.to_thread(self._jobs, request, base)
        if self._is_cancelled:
            outcomes = [await self._services.producer.cancel(job.job_id) for job in jobs]
            # A job that an earlier server submitted may have finished: its result is kept.
            if CancelOutcome.UNKNOWN in outcomes:
                raise BatchOver("batch_cancelled", "the batch was cancelled before this row ran")
            return jobs
        if time.time() >= self._expires_at:
            raise BatchOver("batch_expired", "the batch expired before this row ran")
        with suppress(DuplicateJob):  # submitted by a server before this one
            await self._services.submit(self._caller, jobs)
        if self._is_cancelled:
            self._services.cancel_later([job.job_id for job in jobs])
        return jobs

    def _jobs(self, request: FileRequest, base: str) -> list[GenerationJob]:
        given = {name for name, value in request if value}
        own = {"priority": Priority.LOW, "expires_at": float(self._expires_at)}
        added = {name: value for name, value in own.items() if name not in given}
        return [
            job.model_copy(update={**added, "job_id": f"{base}-{number}" if number else base})
            for number, job in enumerate(file_jobs(request, self._services.models, self._caller))
        ]

    async def _results(self, job_ids: list[str]) -> list[GenerationResult]:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._services.producer.result(i)) for i in job_ids]
        return [task.result() for task in tasks]

    async def _insist(self, work: Callable[[], Awaitable[T]]) -> T:
        """Do *work*, again and again while the queue is full or Redis is away."""
        while True:
            try:
                return await work()
            except _FULL:
                await asyncio.sleep(_PAUSE_S)

    def _answer(
        self,
        request: FileRequest,
        jobs: list[GenerationJob],
        results: list[GenerationResult],
    ) -> Outcome:
        ends = [result.end for result in results]
        if self._is_cancelled and any(isinstance(end, Cancelled) for end in ends):
            raise BatchOver("batch_cancelled", "the batch was cancelled before this row was done")
        if any(isinstance(end, Expired) for end in ends) and time.time() >= self._expires_at:
            raise BatchOver("batch_expired", "the batch expired before this row ran")
        ids = [job.job_id for job in jobs]
        body = file_reply(self._route, jobs, ids, results, encoding=encoding_of(request))
        return Outcome(_response(200, ids[0], body), None)


def _response(status: int, request_id: str, body: dict[str, Any]) -> dict[str, Any]:
    return {"status_code": status, "request_id": request_id, "body": body}
