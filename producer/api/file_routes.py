"""/v1/files."""

import asyncio
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from fastapi.responses import FileResponse
from starlette.datastructures import UploadFile

from ..openai_protocol.errors import ApiError
from .access import BatchesOf, CallerOf, namespace_of

router = APIRouter(prefix="/v1/files")

_FIELDS = {"file", "purpose"}
_PURPOSES = ("batch",)
_PAGE = 10_000


@router.post("")
async def upload(request: Request, batches: BatchesOf, caller: CallerOf) -> dict[str, Any]:
    """Store a file for a batch."""
    async with request.form(max_files=1, max_fields=8) as form:
        unknown = sorted(form.keys() - _FIELDS)
        if unknown:
            raise ApiError(
                400,
                f"{unknown[0]!r} is not supported by this server: leave it out",
                code="unsupported_parameter",
                param=unknown[0],
            )
        file, purpose = form.get("file"), form.get("purpose")
        if not isinstance(file, UploadFile):
            raise ApiError(400, "file: required, as multipart/form-data", param="file")
        if purpose not in _PURPOSES:
            raise ApiError(400, f"purpose: must be one of {', '.join(_PURPOSES)}", param="purpose")
        note = await asyncio.to_thread(
            batches.files.add,
            file.file,
            filename=file.filename or "file",
            purpose=str(purpose),
            namespace=caller.namespace,
        )
    return batches.files.shown(note)


@router.get("")
async def list_files(
    batches: BatchesOf,
    caller: CallerOf,
    limit: Annotated[int, Query(ge=1, le=_PAGE)] = _PAGE,
    after: str | None = None,
    purpose: str | None = None,
) -> dict[str, Any]:
    """List files, newest first."""
    found = await asyncio.to_thread(batches.files.all, namespace_of(caller))
    shown = [batches.files.shown(note) for note in found if purpose in (None, note.purpose)]
    return page_of(shown, limit, after)


@router.get("/{file_id}")
async def get_file(file_id: str, batches: BatchesOf, caller: CallerOf) -> dict[str, Any]:
    """Return a file's object."""
    note = await asyncio.to_thread(batches.files.get, file_id, namespace_of(caller))
    return batches.files.shown(note)


@router.get("/{file_id}/content")
async def get_content(file_id: str, batches: BatchesOf, caller: CallerOf) -> FileResponse:
    """Return a file's content."""
    note = await asyncio.to_thread(batches.files.get, file_id, namespace_of(caller))
    return FileResponse(batches.files.path(note), media_type="application/octet-stream")


@router.delete("/{file_id}")
async def delete_file(file_id: str, batches: BatchesOf, caller: CallerOf) -> dict[str, Any]:
    """Delete a file that no unfinished batch reads."""
    note = await asyncio.to_thread(batches.files.get, file_id, namespace_of(caller))
    if batches.reads(file_id):
        raise ApiError(409, f"{file_id} is being read by a batch: cancel that first")
    await asyncio.to_thread(batches.files.delete, note)
    return {"id": file_id, "object": "file", "deleted": True}


def page_of(shown: list[dict[str, Any]], limit: int, after: str | None) -> dict[str, Any]:
    """Return OpenAI's list object of what stands behind the object *after*."""
    ids = [item["id"] for item in shown]
    start = ids.index(after) + 1 if after in ids else 0
    page = shown[start : start + limit]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": start + limit < len(shown),
    }
