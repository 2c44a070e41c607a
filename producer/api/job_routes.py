"""/v1/jobs: the queue's own jobs, submitted as token ids, read as events."""

import asyncio
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import APIRouter, Header, Query, Request
from fastapi.responses import JSONResponse, Response
from headwater.schemas import EntryId, GenerationJob, HeadwaterError, SchemaError

from ..client_cancel import CancelOutcome
from ..item_json import item_json
from ..job_view import JobView
from ..openai_protocol.caller import Caller
from ..openai_protocol.errors import ApiError, of_any, of_schema
from ..openai_protocol.requests import choose_priority
from ..stream_reader import Ended, Output
from . import sse
from .access import CallerOf, ServicesOf, find_job
from .feed import Feed, Stopped
from .services import Services

router = APIRouter(prefix="/v1/jobs")

_RECONNECT_MS = 1_000
"""What a browser's EventSource waits before it comes back."""


@router.post("", status_code=202)
async def submit(
    body: dict[str, Any],
    request: Request,
    services: ServicesOf,
    caller: CallerOf,
    idempotency_key: Annotated[str | None, Header()] = None,
) -> Response:
    """Submit a GenerationJob; the id may be left out."""
    job = _parse(body, caller)
    job_id = await services.submit_once(caller, job, idempotency_key)
    request.state.job_ids = [job_id]
    return JSONResponse(
        {"id": job_id, "object": "job", "model": job.model, "status": "queued"},
        202,
        {"X-Headwater-Job": job_id, "Location": f"/v1/jobs/{job_id}"},
    )


@router.get("/{job_id}")
async def get(job_id: str, services: ServicesOf, caller: CallerOf) -> dict[str, Any]:
    """Say where a job stands, and how it ended."""
    view = await asyncio.to_thread(find_job, services, caller, job_id)
    return job_object(view)


@router.post("/{job_id}/cancel")
async def cancel(job_id: str, services: ServicesOf, caller: CallerOf) -> dict[str, Any]:
    """Cancel a job; harmless when repeated."""
    await asyncio.to_thread(find_job, services, caller, job_id)
    outcome = await services.producer.cancel(job_id)
    if outcome is CancelOutcome.UNKNOWN:
        raise ApiError(404, f"no such job: {job_id!r}", code="job_not_found")
    return {"id": job_id, "object": "job.cancel", "outcome": outcome.value}


@router.get("/{job_id}/events")
async def events(
    job_id: str,
    services: ServicesOf,
    caller: CallerOf,
    last_event_id: Annotated[str | None, Header()] = None,
    after: Annotated[str | None, Query()] = None,
    cancel_on_disconnect: bool = False,
) -> Response:
    """Stream a job's events from its start, or after the entry that the client saw last."""
    view = await asyncio.to_thread(find_job, services, caller, job_id)
    # A browser that comes back repeats its first URL: the header knows better.
    seen = _entry_id(last_event_id or after)
    if seen is not None and seen == view.end_id:
        return Response(status_code=204)  # tells an EventSource that there is nothing more
    stream = _JobEvents(services, job_id, seen, cancels=cancel_on_disconnect)
    return sse.EventStream(stream.events(), {"X-Headwater-Job": job_id}, stream.close)


def job_object(view: JobView) -> dict[str, Any]:
    """Return what the routes say of a job."""
    end = view.end
    return {
        "id": view.job_id,
        "object": "job",
        "model": view.model,
        "namespace": view.namespace,
        "status": view.status,
        "enqueued_at": view.enqueued_at,
        "last_event_id": str(view.last.id) if view.last else None,
        "end": end.model_dump(mode="json", exclude_none=True) if end else None,
    }


def _parse(body: dict[str, Any], caller: Caller) -> GenerationJob:
    namespace = body.get("namespace", caller.namespace)
    if not caller.may_choose and namespace != caller.namespace:
        raise ApiError(
            403,
            f"namespace: this key's jobs belong to {caller.namespace!r}",
            code="namespace_not_allowed",
            param="namespace",
        )
    own = {"namespace": namespace, "priority": choose_priority(caller, body.get("priority"))}
    try:
        return GenerationJob.parse({"job_id": uuid.uuid4().hex, **body, **own})
    except SchemaError as error:
        raise of_schema(error) from error


def _entry_id(value: str | None) -> EntryId | None:
    if value is None:
        return None
    try:
        return EntryId.parse(value)
    except SchemaError as error:
        raise ApiError(400, f"Last-Event-ID: {error}", code="invalid_value") from error


@dataclass(slots=True)
class _JobEvents:
    """One client's reading of a job's events."""

    services: Services
    job_id: str
    after: EntryId | None
    cancels: bool
    _feed: Feed | None = None
    _is_over: bool = False

    async def events(self) -> AsyncIterator[bytes]:
        """Yield the events; an error is one, and ends them."""
        self._feed = self.services.open_feed([self.job_id], self.after)
        yield f"retry: {_RECONNECT_MS}\n\n".encode()
        try:
            while not self._is_over:
                found = await self._feed.next(self.services.settings.keepalive_s)
                if found is None:
                    yield sse.KEEP_ALIVE
                    continue
                item = found.item
                self._is_over = isinstance(item, Ended)
                data = item_json(item)
                # A client that saw a part of an entry has to get the whole of it again.
                is_last = not isinstance(item, Output) or item.is_last
                yield sse.event(data, name=data["type"], entry_id=item.id if is_last else None)
        except Stopped:
            return
        except HeadwaterError as error:
            yield sse.event(of_any(error).body(), name="error")

    def close(self) -> None:
        """Let go of the job, and cancel it where the client asked for that by leaving."""
        if self._feed is not None:
            self.services.close_feed(self._feed)
        if self.cancels and not self._is_over and not self.services.is_stopping:
            self.services.cancel_later([self.job_id])
