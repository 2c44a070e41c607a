"""OpenAI's response objects: whole replies, and the chunks of streamed ones."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from headwater.schemas import Finished, TextSpan, Usage
from headwater.schemas.logprobs import PositionLogprobs

from ..result import ChoiceResult, GenerationResult
from .errors import of_end
from .logprobs import prompt_logprobs
from .prompt_stream import PromptPiece
from .reply_formats import ReplyFormat


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
    tells_prompt: bool = False
    """Whether the prompt's logprobs were asked for."""
    _started: set[int] = field(default_factory=set)
    _offsets: dict[int, int] = field(default_factory=dict)
    """By choice: characters of the tokens whose logprobs have been told."""

    def whole(self, results: list[GenerationResult], usage: Usage) -> dict[str, Any]:
        """Return the object of a reply that was not streamed."""
        choices = [
            {
                **self._choice(self.index(number, choice), result.choices[choice]),
                **self._of_prompt(result, in_choice=True),
            }
            for number, result in enumerate(results)
            for choice in sorted(result.choices)
        ]
        head = {**self._head(self.format.object), **self._of_prompt(results[0], in_choice=False)}
        return {**head, "choices": choices, "usage": usage_object(usage)}

    def _choice(self, index: int, choice: ChoiceResult) -> dict[str, Any]:
        return {
            "index": index,
            **self.format.whole(choice, self._call_prefix(index)),
            "logprobs": self._logprobs(index, choice.logprobs),
            "finish_reason": choice.finish_reason,
        }

    def _of_prompt(self, result: GenerationResult, *, in_choice: bool) -> dict[str, Any]:
        if not self.tells_prompt or self.format.has_prompt_in_choices != in_choice:
            return {}
        return {"prompt_logprobs": prompt_logprobs(result.prompt_logprobs or ())}

    def chunk(
        self,
        index: int,
        spans: Sequence[TextSpan],
        end: str | None,
        positions: Sequence[PositionLogprobs] | None = None,
    ) -> dict[str, Any]:
        """Return a chunk with new text of choice *index*, or with its finish reason *end*."""
        choice = self._delta(index, spans, self._logprobs(index, positions), end)
        return self._chunk(choice)

    def prompt_chunks(self, job: int, piece: PromptPiece) -> list[dict[str, Any]]:
        """Return the chunks that tell *piece* of a job's prompt, one for each that holds it."""
        choices = range(self.num_choices if self.format.has_prompt_in_choices else 1)
        return [self._prompt_chunk(self.index(job, choice), piece) for choice in choices]

    def begin_at(self, job: int, offset: int) -> None:
        """Let the text of a job's choices begin at *offset*: behind their prompt."""
        for choice in range(self.num_choices):
            self._offsets[self.index(job, choice)] = offset

    def _prompt_chunk(self, index: int, piece: PromptPiece) -> dict[str, Any]:
        spans = (TextSpan(text_start=0, text=piece.text),) if piece.text else ()
        choice = self._delta(index, spans, piece.logprobs, None)
        if piece.prompt_logprobs is None:
            return self._chunk(choice)
        told = {"prompt_logprobs": piece.prompt_logprobs}
        if self.format.has_prompt_in_choices:
            return self._chunk({**choice, **told})
        return {**self._chunk(choice), **told}

    def _delta(
        self,
        index: int,
        spans: Sequence[TextSpan],
        logprobs: dict[str, Any] | None,
        end: str | None,
    ) -> dict[str, Any]:
        delta = self.format.delta(spans, self._call_prefix(index))
        if index not in self._started:
            self._started.add(index)
            delta = self.format.first(delta)
        return {"index": index, **delta, "logprobs": logprobs, "finish_reason": end}

    def _chunk(self, choice: dict[str, Any]) -> dict[str, Any]:
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

    def _logprobs(
        self, index: int, positions: Sequence[PositionLogprobs] | None
    ) -> dict[str, Any] | None:
        if not positions:
            return None
        offset = self._offsets.get(index, 0)
        self._offsets[index] = offset + sum(len(position.text) for position in positions)
        return self.format.logprobs(positions, offset)

    def _call_prefix(self, index: int) -> str:
        return f"call_{self.job_ids[0]}_{index}"

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
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
    }


def total(usages: list[Usage]) -> Usage:
    """Return the sum of several jobs' usage."""
    return Usage(
        prompt_tokens=sum(usage.prompt_tokens for usage in usages),
        completion_tokens=sum(usage.completion_tokens for usage in usages),
        cached_tokens=sum(usage.cached_tokens for usage in usages),
        reasoning_tokens=sum(usage.reasoning_tokens for usage in usages),
    )
