"""/v1/embeddings: prompts as vectors."""

import asyncio
from typing import Any, Literal

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from headwater.schemas import Finished, GenerationJob, StreamMode
from headwater.schemas.kinds import Pooling
from pydantic import BaseModel, ConfigDict

from ..client import new_embedding_job
from ..result import GenerationResult
from .access import CallerOf, ServicesOf
from .api_keys import Caller
from .errors import of_end
from .prompts import Prompt, encode_prompts
from .replies import total
from .requests import Models
from .text_routes import JOB_HEADER
from .waiting import CLIENT_LEFT, results

router = APIRouter()


class EmbeddingRequest(BaseModel):
    """The body of /v1/embeddings: OpenAI's fields, and a job's own `pooling` and `normalize`.

    OpenAI's `dimensions` is not among them: only models trained for it can be cut short.
    """

    model_config = ConfigDict(extra="forbid")

    model: str
    input: Prompt
    encoding_format: Literal["float", "base64"] = "float"
    pooling: Pooling = Pooling.LAST
    normalize: bool = True
    user: str | None = None
    """OpenAI's name of a caller's own user; no vector depends on it."""


@router.post("/v1/embeddings", response_model=None)
async def embeddings(
    body: EmbeddingRequest, request: Request, services: ServicesOf, caller: CallerOf
) -> Response:
    """Embed one or many inputs; the jobs of a client that leaves are cancelled."""
    jobs = await asyncio.to_thread(_jobs_of, body, services.models, caller)
    job_ids = await services.submit(caller, jobs)
    request.state.job_ids = job_ids
    found = await results(request, services, job_ids, cancels=True)
    if found is None:
        return Response(status_code=CLIENT_LEFT)
    return JSONResponse(_reply(body, found), headers={JOB_HEADER: ",".join(job_ids)})


def _jobs_of(body: EmbeddingRequest, models: Models, caller: Caller) -> list[GenerationJob]:
    """Return one job an input; raises ApiError, and ProducerError's kinds."""
    # A worker may have changed the model behind the alias, and with it the tokenizer.
    models.card(body.model, refresh=True)
    tokenizer = models.tokenizer(body.model)
    return [
        new_embedding_job(
            body.model,
            prompt,
            pooling=body.pooling,
            normalize=body.normalize,
            namespace=caller.namespace,
            priority=caller.priority,
            stream=StreamMode.FINAL,
            tokenizer_fingerprint=tokenizer.fingerprint,
        )
        for prompt in encode_prompts(tokenizer, body.input)
    ]


def _reply(body: EmbeddingRequest, found: list[GenerationResult]) -> dict[str, Any]:
    ends = [_finished(result) for result in found]
    usage = total([end.usage for end in ends])
    return {
        "object": "list",
        "model": body.model,
        "data": [
            {"object": "embedding", "index": index, "embedding": _vector(end, body.encoding_format)}
            for index, end in enumerate(ends)
        ],
        "usage": {"prompt_tokens": usage.prompt_tokens, "total_tokens": usage.prompt_tokens},
    }


def _finished(result: GenerationResult) -> Finished:
    if not isinstance(result.end, Finished):
        raise of_end(result.end)
    return result.end


def _vector(end: Finished, encoding: str) -> str | list[float]:
    if end.embedding is None:
        raise ValueError("an embedding job has finished without a vector")
    return end.embedding.vector if encoding == "base64" else end.embedding.floats()
