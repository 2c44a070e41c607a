"""/v1/batches."""

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query
from pydantic import BaseModel, ConfigDict

from .access import BatchesOf, CallerOf, namespace_of
from .file_routes import page_of

router = APIRouter(prefix="/v1/batches")


class BatchRequest(BaseModel):
    """The body of POST /v1/batches."""

    model_config = ConfigDict(extra="forbid")

    input_file_id: str
    endpoint: str
    completion_window: Literal["24h"]
    metadata: dict[str, str] | None = None


# Not in threads: a batch's state belongs to the event loop, and its note is small.


@router.post("")
async def create(body: BatchRequest, batches: BatchesOf, caller: CallerOf) -> dict[str, Any]:
    """Begin a batch."""
    return batches.create(body.endpoint, body.input_file_id, caller, body.metadata).shown()


@router.get("")
async def list_batches(
    batches: BatchesOf,
    caller: CallerOf,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    after: str | None = None,
) -> dict[str, Any]:
    """List batches, newest first."""
    found = batches.all(namespace_of(caller))
    return page_of([batch.shown() for batch in found], limit, after)


@router.get("/{batch_id}")
async def get(batch_id: str, batches: BatchesOf, caller: CallerOf) -> dict[str, Any]:
    """Return a batch."""
    return batches.get(batch_id, namespace_of(caller)).shown()


@router.post("/{batch_id}/cancel")
async def cancel(batch_id: str, batches: BatchesOf, caller: CallerOf) -> dict[str, Any]:
    """Cancel a batch; rows that have finished keep their results."""
    return batches.cancel(batch_id, namespace_of(caller)).shown()
