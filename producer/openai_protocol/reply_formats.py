"""How each of the two text routes says what a choice holds."""

from collections.abc import Sequence
from typing import Any, Protocol

from headwater.schemas import Channel, TextSpan, ToolCall
from headwater.schemas.logprobs import PositionLogprobs

from ..result import ChoiceResult
from .logprobs import chat_logprobs, completion_logprobs


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
