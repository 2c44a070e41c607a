"""/v1/embeddings: prompts as vectors."""

import asyncio

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from ..openai_protocol.embeddings import EmbeddingRequest, embedding_jobs, embedding_reply
from .access import CallerOf, ServicesOf
from .text_routes import JOB_HEADER
from .waiting import CLIENT_LEFT, results

router = APIRouter()


@router.post("/v1/embeddings", response_model=None)
async def embeddings(
    body: EmbeddingRequest, request: Request, services: ServicesOf, caller: CallerOf
) -> Response:
    """Embed one or many inputs; the jobs of a client that leaves are cancelled."""
    jobs = await asyncio.to_thread(embedding_jobs, body, services.models, caller)
    job_ids = await services.submit(caller, jobs)
    request.state.job_ids = job_ids
    found = await results(request, services, job_ids, cancels=True)
    if found is None:
        return Response(status_code=CLIENT_LEFT)
    reply = embedding_reply(body.model, found, body.encoding_format)
    return JSONResponse(reply, headers={JOB_HEADER: ",".join(job_ids)})
