"""OpenAI's response objects: whole replies, and the chunks of streamed ones."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from headwater.schemas import Channel, Finished, Usage

from ..result import ChoiceResult, GenerationResult
from .errors import of_end


class ReplyFormat(Protocol):
    """How one route says what a choice holds."""

    object: str
    chunk_object: str
    id_prefix: str

    def delta(self, texts: Mapping[Channel, str], *, is_first: bool) -> dict[str, Any]:
        """Return the fields of a chunk's choice that hold new *texts*."""
        ...

    def whole(self, choice: ChoiceResult) -> dict[str, Any]:
        """Return the fields of a choice that hold its output."""
        ...


class ChatFormat:
    """/v1/chat/completions."""

    object = "chat.completion"
    chunk_object = "chat.completion.chunk"
    id_prefix = "chatcmpl-"

    def delta(self, texts: Mapping[Channel, str], *, is_first: bool) -> dict[str, Any]:
        """Return the delta; a choice's first one names the role."""
        role = {"role": "assistant"} if is_first else {}
        content = {"content": texts[Channel.CONTENT]} if texts.get(Channel.CONTENT) else {}
        return {"delta": {**role, **content}}

    def whole(self, choice: ChoiceResult) -> dict[str, Any]:
        """Return the message."""
        return {"message": {"role": "assistant", "content": choice.text, "refusal": None}}


class CompletionFormat:
    """/v1/completions."""

    object = "text_completion"
    chunk_object = "text_completion"
    id_prefix = "cmpl-"

    def delta(self, texts: Mapping[Channel, str], *, is_first: bool) -> dict[str, Any]:
        """Return the text; *is_first* makes no difference here."""
        del is_first
        return {"text": texts.get(Channel.CONTENT, "")}

    def whole(self, choice: ChoiceResult) -> dict[str, Any]:
        """Return the text."""
        return {"text": choice.text}


@dataclass(slots=True)
class Reply:
    """What all objects of one reply share."""

    format: ReplyFormat
    model: str
    job_ids: list[str]
    created: int
    """Unix seconds."""
    include_usage: bool = False
    num_choices: int = 1
    """Of each job: job i's choice c is the reply's choice i * num_choices + c."""
    _started: set[int] = field(default_factory=set)

    def whole(self, results: list[GenerationResult], usage: Usage) -> dict[str, Any]:
        """Return the object of a reply that was not streamed."""
        choices = [
            {
                "index": self.index(number, choice),
                **self.format.whole(result.choices[choice]),
                "logprobs": None,
                "finish_reason": result.choices[choice].finish_reason,
            }
            for number, result in enumerate(results)
            for choice in sorted(result.choices)
        ]
        return {**self._head(self.format.object), "choices": choices, "usage": usage_object(usage)}

    def chunk(self, index: int, texts: Mapping[Channel, str], end: str | None) -> dict[str, Any]:
        """Return a chunk with new text of choice *index*, or with its finish reason *end*."""
        is_first = index not in self._started
        self._started.add(index)
        choice = {
            "index": index,
            **self.format.delta(texts, is_first=is_first),
            "logprobs": None,
            "finish_reason": end,
        }
        # With usage asked for, OpenAI's chunks hold a null until the last one.
        usage = {"usage": None} if self.include_usage else {}
        return {**self._head(self.format.chunk_object), "choices": [choice], **usage}

    def usage_chunk(self, usage: Usage) -> dict[str, Any]:
        """Return the chunk without choices that closes a stream with usage."""
        head = self._head(self.format.chunk_object)
        return {**head, "choices": [], "usage": usage_object(usage)}

    def index(self, job: int, choice: int) -> int:
        """Return the number in this reply of a job's choice."""
        return job * self.num_choices + choice

    def _head(self, kind: str) -> dict[str, Any]:
        return {
            "id": self.format.id_prefix + self.job_ids[0],
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": None,
        }


def whole_reply(reply: Reply, results: list[GenerationResult]) -> dict[str, Any]:
    """Return the reply's object; raises ApiError where a job did not finish."""
    usages = []
    for result in results:
        if not isinstance(result.end, Finished):
            raise of_end(result.end)
        usages.append(result.end.usage)
    return reply.whole(results, total(usages))


def usage_object(usage: Usage) -> dict[str, Any]:
    """Return OpenAI's usage object."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


def total(usages: list[Usage]) -> Usage:
    """Return the sum of several jobs' usage."""
    return Usage(
        prompt_tokens=sum(usage.prompt_tokens for usage in usages),
        completion_tokens=sum(usage.completion_tokens for usage in usages),
        cached_tokens=sum(usage.cached_tokens for usage in usages),
    )
