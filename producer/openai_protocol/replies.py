"""OpenAI's response objects: whole replies, and the chunks of streamed ones."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from headwater.schemas import Channel, Finished, TextSpan, ToolCall, Usage
from headwater.schemas.logprobs import PositionLogprobs

from ..result import ChoiceResult, GenerationResult
from .errors import of_end
from .logprobs import chat_logprobs, completion_logprobs, prompt_logprobs


class ReplyFormat(Protocol):
    """How one route says what a choice holds."""

    object: str
    chunk_object: str
    id_prefix: str
    has_prompt_in_choices: bool
    """Where a prompt's logprobs stand: a request of many prompts has one for each choice."""

    def delta(self, spans: Sequence[TextSpan], call_prefix: str) -> dict[str, Any]:
        """Return the fields of a chunk's choice that hold new text."""
        ...

    def whole(self, choice: ChoiceResult, call_prefix: str) -> dict[str, Any]:
        """Return the fields of a choice that hold its output."""
        ...

    def first(self, delta: dict[str, Any]) -> dict[str, Any]:
        """Return *delta* with what a choice's first chunk says besides."""
        ...

    def logprobs(self, positions: Sequence[PositionLogprobs], offset: int) -> dict[str, Any]:
        """Return what it says of tokens whose text begins at *offset*."""
        ...


class ChatFormat:
    """/v1/chat/completions. A call's id is the model's own, or made of *call_prefix*."""

    object = "chat.completion"
    chunk_object = "chat.completion.chunk"
    id_prefix = "chatcmpl-"
    has_prompt_in_choices = False

    def delta(self, spans: Sequence[TextSpan], call_prefix: str) -> dict[str, Any]:
        """Return the delta: content, reasoning_content, tool_calls."""
        delta: dict[str, Any] = {}
        for span in spans:
            if span.channel is Channel.TOOL_CALL:
                delta.setdefault("tool_calls", []).append(_call_delta(span, call_prefix))
            else:
                name = _CHANNEL_FIELDS[span.channel]
                delta[name] = delta.get(name, "") + span.text
        return {"delta": delta}

    def whole(self, choice: ChoiceResult, call_prefix: str) -> dict[str, Any]:
        """Return the message."""
        message: dict[str, Any] = {"role": "assistant", "content": choice.text, "refusal": None}
        if choice.reasoning:
            message["reasoning_content"] = choice.reasoning
        if choice.tool_calls:
            message["content"] = choice.text or None
            message["tool_calls"] = [_call(call, call_prefix) for call in choice.tool_calls]
        return {"message": message}

    def first(self, delta: dict[str, Any]) -> dict[str, Any]:
        """Return *delta* with the role."""
        return {"delta": {"role": "assistant", "content": "", **delta["delta"]}}

    def logprobs(self, positions: Sequence[PositionLogprobs], offset: int) -> dict[str, Any]:
        """Return the tokens with their bytes; *offset* is of no use here."""
        del offset
        return chat_logprobs(positions)


class CompletionFormat:
    """/v1/completions: plain text, in which nothing is told apart."""

    object = "text_completion"
    chunk_object = "text_completion"
    id_prefix = "cmpl-"
    has_prompt_in_choices = True

    def delta(self, spans: Sequence[TextSpan], call_prefix: str) -> dict[str, Any]:
        """Return the text."""
        del call_prefix
        return {"text": "".join(span.text for span in spans)}

    def whole(self, choice: ChoiceResult, call_prefix: str) -> dict[str, Any]:
        """Return the text."""
        del call_prefix
        return {"text": choice.text}

    def first(self, delta: dict[str, Any]) -> dict[str, Any]:
        """Return *delta* as it is."""
        return delta

    def logprobs(self, positions: Sequence[PositionLogprobs], offset: int) -> dict[str, Any]:
        """Return the tokens with their places in the text."""
        return completion_logprobs(positions, offset)


_CHANNEL_FIELDS = {Channel.CONTENT: "content", Channel.REASONING: "reasoning_content"}


def _call_delta(span: TextSpan, call_prefix: str) -> dict[str, Any]:
    function = {"arguments": span.text}
    if span.name is None:
        return {"index": span.index, "function": function}
    head = {"id": span.call_id or f"{call_prefix}_{span.index}", "type": "function"}
    return {"index": span.index, **head, "function": {"name": span.name, **function}}


def _call(call: ToolCall, call_prefix: str) -> dict[str, Any]:
    return {
        "id": call.call_id or f"{call_prefix}_{call.index}",
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }


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
        delta = self.format.delta(spans, self._call_prefix(index))
        if index not in self._started:
            self._started.add(index)
            delta = self.format.first(delta)
        logprobs = self._logprobs(index, positions)
        choice = {"index": index, **delta, "logprobs": logprobs, "finish_reason": end}
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
