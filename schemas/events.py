"""The events of a job's stream, and their form as stream entries.

An attempt opens with a fence (`started`, `resumed` or `restarted`), goes on with `delta`s,
and closes with `released` (handed back) or with one end. Nothing follows an end.
"""

from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated, Any, Literal, NamedTuple, Self, TypeAlias

import orjson
from pydantic import Field, TypeAdapter, ValidationError, model_validator

from .base import WireModel, describe
from .errors import SchemaError
from .job import TokenId
from .kinds import Embedding, Score
from .logprobs import PositionLogprobs, PromptPart


class Channel(StrEnum):
    """Which part of a reply a text belongs to."""

    CONTENT = "content"
    REASONING = "reasoning"
    """What the model thinks before it answers."""
    TOOL_CALL = "tool_call"
    """A call's arguments, JSON as it grows; each call of a choice has positions of its own."""


class FinishReason(StrEnum):
    """Why a choice ended."""

    STOP = "stop"
    """An end-of-sequence token, a stop token or a stop string."""
    LENGTH = "length"
    """max_tokens reached, or the model's context is full."""
    TOOL_CALLS = "tool_calls"
    """As stop, and the model called at least one tool."""


class TextSpan(WireModel):
    """Text of one channel and where it stands in that channel, counted in characters.

    The text of a tool call is its arguments; the span that begins them names the tool.
    """

    channel: Channel = Channel.CONTENT
    text_start: int = Field(ge=0)
    text: str
    index: int | None = Field(default=None, ge=0)
    """Which of the choice's tool calls this belongs to; None in the other channels."""
    name: str | None = None
    """The tool's name, where text_start is 0."""
    call_id: str | None = None
    """The call's id, beside the name, for models that give one."""

    def is_continued_by(self, other: "TextSpan") -> bool:
        """Whether *other* is of the same channel, and of the same tool call in it."""
        return (self.channel, self.index) == (other.channel, other.index)

    def after(self, num_chars: int) -> Self:
        """Return what is left behind the first *num_chars* characters."""
        changes: dict[str, Any] = {
            "text_start": self.text_start + num_chars,
            "text": self.text[num_chars:],
        }
        if num_chars:
            changes |= {"name": None, "call_id": None}
        return self.model_copy(update=changes)

    @model_validator(mode="after")
    def _only_calls_are_numbered(self) -> Self:
        if (self.index is None) == (self.channel is Channel.TOOL_CALL):
            raise ValueError("a span has an index if and only if it belongs to a tool call")
        return self


class ToolCall(WireModel):
    """One call of a tool, as far as the model wrote it."""

    index: int = Field(ge=0)
    name: str
    arguments: str
    """JSON, unless the call is among the choice's incomplete_tool_calls."""
    call_id: str | None = None
    """For models that give their calls one."""


class DeltaPart(WireModel):
    """What one choice gained: every token since the last delta, and the text now certain.

    Token ids include those whose text is still held back.
    """

    choice: int = Field(ge=0)
    start: int = Field(ge=0)
    """Output tokens of this choice before *token_ids*."""
    token_ids: tuple[TokenId, ...]
    text: tuple[TextSpan, ...] = ()
    logprobs: tuple[PositionLogprobs, ...] | None = None
    """One for each of *token_ids* where the job asks for them."""
    prompt: PromptPart | None = None
    """Of choice 0 of a job that asks for prompt_logprobs, before its first token."""

    @model_validator(mode="after")
    def _logprobs_are_of_the_tokens(self) -> Self:
        if self.logprobs is None:
            return self
        if tuple(each.token_id for each in self.logprobs) != self.token_ids:
            raise ValueError("logprobs must hold one entry for each of token_ids")
        return self


class ChoiceEnd(WireModel):
    """How one choice ended."""

    choice: int = Field(ge=0)
    finish_reason: FinishReason
    matched_stop: str | int | None = None
    """The stop string or stop token id that ended it; None for end-of-sequence and length."""
    text: str | None = None
    """The whole content, for a job with stream="final"."""
    reasoning: str | None = None
    """The whole reasoning, for such a job where there is any."""
    tool_calls: tuple[ToolCall, ...] = ()
    """All of them, for such a job."""
    incomplete_tool_calls: tuple[int, ...] = ()
    """Indices of calls whose arguments were cut short or are no JSON object."""
    logprobs: tuple[PositionLogprobs, ...] | None = None
    """Of every output token, for a job with stream="final" that asks for them."""


class CachedTokens(WireModel):
    """Where a job's cached prompt tokens came from."""

    memory: int = Field(default=0, ge=0)
    disk: int = Field(default=0, ge=0)
    in_flight: int = Field(default=0, ge=0)
    """Another job computed them while this one waited for them."""


class Usage(WireModel):
    """Token counts of a job. Prompt tokens = cached tokens + tokens computed."""

    prompt_tokens: int = Field(ge=0)
    completion_tokens: int = Field(ge=0)
    cached_tokens: int = Field(default=0, ge=0)
    """Prompt tokens whose keys and values were reused."""
    cached_from: CachedTokens = CachedTokens()
    """The same tokens by where they were."""
    reasoning_tokens: int = Field(default=0, ge=0)
    """Completion tokens that the model spent on reasoning, its markers not counted."""


class Timings(WireModel):
    """Milliseconds as the finishing worker saw them."""

    queue_ms: float | None = None
    """From enqueueing to the first attempt's start."""
    ttft_ms: float | None = None
    """From this attempt's start to its first new token."""
    total_ms: float = Field(ge=0)
    """From this attempt's start to the end."""


class _Fence(WireModel):
    worker_id: str
    sampler_version: int
    metadata: dict[str, Any] = Field(default_factory=dict)


class Started(_Fence):
    """The first attempt begins."""

    type: Literal["started"] = "started"


class Resumed(_Fence):
    """A later attempt begins; it continues the text so far."""

    type: Literal["resumed"] = "resumed"


class Restarted(_Fence):
    """The text so far is void: readers discard it. Opens an attempt, or stands early in it."""

    type: Literal["restarted"] = "restarted"


class Released(WireModel):
    """The worker handed the job back to its queue."""

    type: Literal["released"] = "released"
    reason: str


class Delta(WireModel):
    """New tokens and text of one or more choices."""

    type: Literal["delta"] = "delta"
    parts: tuple[DeltaPart, ...]


class _End(WireModel):
    metadata: dict[str, Any] = Field(default_factory=dict)


class Finished(_End):
    """Every choice ended, or what was asked for is computed."""

    type: Literal["finished"] = "finished"
    choices: tuple[ChoiceEnd, ...] = ()
    """Of a job that generates."""
    scores: tuple[Score, ...] = ()
    """Of a job of kind "score", in the order of its continuations."""
    embedding: Embedding | None = None
    """Of a job of kind "embedding"."""
    usage: Usage
    timings: Timings


class Failed(_End):
    """The job ended with an error."""

    type: Literal["failed"] = "failed"
    code: str
    message: str
    retryable: bool = False
    """Whether the same job may succeed when submitted again."""


class Cancelled(_End):
    """Someone cancelled the job."""

    type: Literal["cancelled"] = "cancelled"


class Expired(_End):
    """The job was still queued at its expires_at."""

    type: Literal["expired"] = "expired"


Fence: TypeAlias = Started | Resumed | Restarted
End: TypeAlias = Finished | Failed | Cancelled | Expired
Event: TypeAlias = Fence | Released | Delta | End

END_TYPES = (Finished, Failed, Cancelled, Expired)
FENCE_TYPES = (Started, Resumed, Restarted)

_EVENT: TypeAdapter[Event] = TypeAdapter(Annotated[Event, Field(discriminator="type")])


class EntryId(NamedTuple):
    """A stream entry's id, `<attempt>-<seq>`; seq counts from 0 without gaps."""

    attempt: int
    seq: int

    @classmethod
    def parse(cls, value: bytes | str) -> Self:
        """Parse the form that Redis gives; raises SchemaError."""
        text = value.decode("ascii", "replace") if isinstance(value, bytes) else value
        attempt, dash, seq = text.partition("-")
        # isdigit() alone would take other scripts' digits.
        if not (dash and text.isascii() and attempt.isdigit() and seq.isdigit()):
            raise SchemaError(f"not an entry id: {text!r}; expected <attempt>-<seq>")
        return cls(int(attempt), int(seq))

    def __str__(self) -> str:
        return f"{self.attempt}-{self.seq}"


class StreamEntry(NamedTuple):
    """One entry of a job's stream."""

    id: EntryId
    event: Event
    execution_id: str | None = None
    """On the entry that opens an attempt: whose attempt it is."""
    at_ms: int | None = None
    """On the entry that opens an attempt: Redis' time then, Unix milliseconds."""

    @property
    def is_end(self) -> bool:
        """Whether this is the stream's last entry."""
        return isinstance(self.event, END_TYPES)


def encode_fields(event: Event) -> dict[str, bytes]:
    """Return the fields of a stream entry for *event*."""
    body = event.model_dump(mode="json", exclude_none=True, exclude={"type"})
    fields = {"type": event.type.encode(), "data": orjson.dumps(body)}
    if isinstance(event, END_TYPES):
        fields["end"] = b"1"
    return fields


def decode_entry(entry_id: bytes | str, fields: Mapping[bytes, bytes]) -> StreamEntry:
    """Parse what XREAD and XRANGE give; raises SchemaError."""
    parsed_id = EntryId.parse(entry_id)
    try:
        body = orjson.loads(fields[b"data"])
        event = _EVENT.validate_python({**body, "type": fields[b"type"].decode()})
        at_ms = int(fields[b"at"]) if b"at" in fields else None
    except ValidationError as error:
        raise SchemaError(f"entry {parsed_id}: {describe(error)}") from error
    except (KeyError, TypeError, ValueError) as error:
        raise SchemaError(f"entry {parsed_id} is not an event: {error!r}") from error
    execution = fields.get(b"execution")
    return StreamEntry(parsed_id, event, execution.decode() if execution else None, at_ms)
