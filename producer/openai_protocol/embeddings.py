"""The body of /v1/embeddings, the jobs that it asks for, and the reply."""

from collections.abc import Sequence
from typing import Any, Literal

from headwater.schemas import Finished, GenerationJob, Priority, StreamMode
from headwater.schemas.kinds import Pooling
from pydantic import BaseModel, ConfigDict

from ..client import new_embedding_job
from ..result import GenerationResult
from .caller import Caller
from .errors import of_end
from .prompts import Prompt, encode_prompts
from .replies import total
from .requests import Models, choose_priority

Encoding = Literal["float", "base64"]


class EmbeddingRequest(BaseModel):
    """The body of /v1/embeddings: OpenAI's fields, and a job's `pooling`, `normalize`, `priority`.

    OpenAI's `dimensions` is not among them: only models trained for it can be cut short.
    """

    model_config = ConfigDict(extra="forbid")

    model: str
    input: Prompt
    encoding_format: Encoding = "float"
    pooling: Pooling = Pooling.LAST
    normalize: bool = True
    priority: Priority | None = None
    user: str | None = None
    """OpenAI's name of a caller's own user; no vector depends on it."""


def embedding_jobs(
    request: EmbeddingRequest, models: Models, caller: Caller
) -> list[GenerationJob]:
    """Return one job an input; raises ApiError, and ProducerError's kinds."""
    # A worker may have changed the model behind the alias, and with it the tokenizer.
    models.card(request.model, refresh=True)
    tokenizer = models.tokenizer(request.model)
    return [
        new_embedding_job(
            request.model,
            prompt,
            pooling=request.pooling,
            normalize=request.normalize,
            namespace=caller.namespace,
            priority=choose_priority(caller, request.priority),
            stream=StreamMode.FINAL,
            tokenizer_fingerprint=tokenizer.fingerprint,
        )
        for prompt in encode_prompts(tokenizer, request.input)
    ]


def embedding_reply(
    model: str, results: Sequence[GenerationResult], encoding: Encoding
) -> dict[str, Any]:
    """Return the reply's body; raises ApiError for a job that did not finish."""
    ends = [_finished(result) for result in results]
    num_tokens = total([end.usage for end in ends]).prompt_tokens
    return {
        "object": "list",
        "model": model,
        "data": [
            {"object": "embedding", "index": index, "embedding": _vector(end, encoding)}
            for index, end in enumerate(ends)
        ],
        "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
    }


def _finished(result: GenerationResult) -> Finished:
    if not isinstance(result.end, Finished):
        raise of_end(result.end)
    return result.end


def _vector(end: Finished, encoding: Encoding) -> str | list[float]:
    if end.embedding is None:
        raise ValueError("an embedding job has finished without a vector")
    return end.embedding.vector if encoding == "base64" else end.embedding.floats()
