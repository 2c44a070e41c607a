"""The routes whose requests may stand in a file: each one's jobs, and the reply to it."""

import time
from collections.abc import Mapping, Sequence
from typing import Any, Final, TypeAlias

from headwater.schemas import GenerationJob
from pydantic import ValidationError

from ..result import GenerationResult
from .caller import Caller
from .embeddings import EmbeddingRequest, Encoding, embedding_jobs, embedding_reply
from .errors import ApiError
from .replies import Reply, whole_reply
from .reply_formats import ChatFormat, CompletionFormat
from .requests import ChatRequest, CompletionRequest, Models, jobs_of

CHAT: Final = "/v1/chat/completions"
TEXT: Final = "/v1/completions"
EMBEDDING: Final = "/v1/embeddings"

FileRequest: TypeAlias = ChatRequest | CompletionRequest | EmbeddingRequest

ROUTES: Final[Mapping[str, type[FileRequest]]] = {
    CHAT: ChatRequest,
    TEXT: CompletionRequest,
    EMBEDDING: EmbeddingRequest,
}


def parse_request(route: str, body: dict[str, Any]) -> FileRequest:
    """Return the request to one of ROUTES; raises ApiError for its first wrong field."""
    try:
        return ROUTES[route].model_validate(body)
    except ValidationError as error:
        detail = error.errors(include_url=False, include_input=False)[0]
        name = ".".join(map(str, detail["loc"]))
        raise ApiError(422, f"{name}: {detail['msg']}", param=name) from error


def file_jobs(request: FileRequest, models: Models, caller: Caller) -> list[GenerationJob]:
    """Return the jobs that *request* asks for; raises ApiError, and ProducerError's kinds."""
    if isinstance(request, EmbeddingRequest):
        return embedding_jobs(request, models, caller)
    if isinstance(request, CompletionRequest) and request.echo:
        raise ApiError(400, "echo: not in files", code="unsupported_parameter", param="echo")
    return jobs_of(request, models, caller)


def encoding_of(request: FileRequest) -> Encoding:
    """Return how the reply holds an embedding's numbers."""
    return request.encoding_format if isinstance(request, EmbeddingRequest) else "float"


def file_reply(
    route: str,
    jobs: Sequence[GenerationJob],
    job_ids: Sequence[str],
    results: Sequence[GenerationResult],
    *,
    encoding: Encoding = "float",
) -> dict[str, Any]:
    """Return the body of the reply; raises ApiError where a job did not finish.

    *job_ids* are those under which the jobs ran. *encoding* is of an embedding's numbers.
    """
    model = jobs[0].model
    if route == EMBEDDING:
        return embedding_reply(model, results, encoding)
    form = ChatFormat() if route == CHAT else CompletionFormat()
    reply = Reply(
        form,
        model,
        list(job_ids),
        int(time.time()),
        num_choices=jobs[0].sampling.n,
        tells_prompt=jobs[0].prompt_logprobs is not None,
    )
    return whole_reply(reply, list(results))
