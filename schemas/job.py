"""GenerationJob: what a producer asks for."""

from enum import StrEnum
from typing import Annotated, Any, Final, Literal, Self

from pydantic import (
    FailFast,
    Field,
    StringConstraints,
    ValidationInfo,
    field_validator,
    model_validator,
)

from . import limits
from .base import RequestModel, json_size
from .kinds import JobKind, Pooling
from .response_format import ResponseFormat
from .tool_choice import NamedTool, ToolChoice, tool_name

SCHEMA_VERSION: Final = 1

Name = Annotated[
    str,
    StringConstraints(pattern=r"^[A-Za-z0-9_-]+$", max_length=limits.MAX_NAME_CHARS),
]
"""A model alias or a namespace: it becomes a part of Redis names."""

JobId = Annotated[
    str,
    StringConstraints(pattern=r"^[A-Za-z0-9_-]+$", max_length=limits.MAX_JOB_ID_CHARS),
]
TokenId = Annotated[int, Field(strict=True, ge=0, le=limits.MAX_TOKEN_ID)]
TokenIds = Annotated[tuple[TokenId, ...], FailFast()]
Continuation = Annotated[TokenIds, Field(min_length=1, max_length=limits.MAX_PROMPT_TOKENS)]
StopString = Annotated[
    str, StringConstraints(min_length=1, max_length=limits.MAX_STOP_STRING_CHARS)
]
Continuations = Annotated[tuple[Continuation, ...], FailFast()]
StopStrings = Annotated[tuple[StopString, ...], FailFast()]
Penalty = Annotated[float, Field(ge=-limits.MAX_PENALTY, le=limits.MAX_PENALTY)]
BiasedTokenId = Annotated[int, Field(ge=0, le=limits.MAX_TOKEN_ID)]
"""Not strict: in JSON the keys of an object are strings."""
Bias = Annotated[float, Field(ge=-limits.MAX_LOGIT_BIAS, le=limits.MAX_LOGIT_BIAS)]


class Priority(StrEnum):
    """A job's class; each has a queue of its own."""

    HIGH = "high"
    NORMAL = "normal"
    LOW = "low"


class StreamMode(StrEnum):
    """How much of a job's stream is published while it runs."""

    DELTAS = "deltas"
    FINAL = "final"
    """Checkpoints of token ids only; the text stands in the finished event."""


class SamplingParams(RequestModel):
    """How the next token is chosen.

    In this order: logit_bias, repetition_penalty, presence_penalty and frequency_penalty change
    the model's logits; bad_token_ids (and ends before min_tokens) are ruled out; then top_p,
    min_p and top_k look at the distribution that is left, at temperature 1, and the draw comes
    at *temperature*. Temperature 0 is greedy: it takes the likeliest and needs no filter.
    """

    temperature: float = Field(default=0.0, ge=0.0, le=100.0)
    top_k: int = Field(default=0, ge=0, le=limits.MAX_TOKEN_ID, strict=True)
    """Keep the k likeliest tokens; 0 keeps all."""
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    min_p: float = Field(default=0.0, ge=0.0, lt=1.0)
    """Keep tokens whose probability is at least this share of the likeliest one's."""
    repetition_penalty: float = Field(default=1.0, gt=0.0, le=limits.MAX_REPETITION_PENALTY)
    """Divides a positive logit, multiplies a negative one, of tokens in the window."""
    repetition_window: int = Field(default=20, ge=0, le=limits.MAX_PROMPT_TOKENS, strict=True)
    """How many of the last tokens, prompt and output, repetition_penalty looks at; 0: all."""
    presence_penalty: Penalty = 0.0
    """Subtracted from the logit of every token that the output holds; the prompt's don't count."""
    frequency_penalty: Penalty = 0.0
    """Subtracted once for every time that the output holds the token."""
    logit_bias: dict[BiasedTokenId, Bias] = Field(
        default_factory=dict, max_length=limits.MAX_LOGIT_BIASES
    )
    """Added to the logits of these token ids."""
    bad_token_ids: TokenIds = Field(default=(), max_length=limits.MAX_BAD_TOKEN_IDS)
    """Never sampled."""
    seed: int | None = Field(default=None, ge=0, le=limits.MAX_SEED, strict=True)
    """Draws depend on (seed, choice, index of the output token) only. Submit fills it in."""
    n: int = Field(default=1, ge=1, le=limits.MAX_CHOICES, strict=True)
    """Choices: independent texts of one prompt, which is computed once."""

    @field_validator("logit_bias", mode="before")
    @classmethod
    def _biases_are_few(cls, value: Any) -> Any:
        # Before each wrong one of them becomes an error of its own.
        if isinstance(value, dict) and len(value) > limits.MAX_LOGIT_BIASES:
            raise ValueError(f"has {len(value)} entries; at most {limits.MAX_LOGIT_BIASES}")
        return value


_OF_GENERATIONS_ONLY: Final = (
    "min_tokens",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "include_stop_str",
    "logprobs",
    "prompt_logprobs",
    "response_format",
    "tools",
    "tool_choice",
)


class GenerationJob(RequestModel):
    """One request, as it lies in the queue: for text, unless *kind* says otherwise.

    Jobs of other kinds compute the prompt only; they have max_tokens 1 and nothing of what
    concerns new tokens.
    """

    schema_version: Literal[1] = SCHEMA_VERSION
    job_id: JobId
    model: Name
    kind: JobKind = JobKind.GENERATE
    adapter: Name | None = None
    """The alias of one of the worker's LoRA adapters; None is the model itself."""
    prompt_token_ids: TokenIds = Field(min_length=1, max_length=limits.MAX_PROMPT_TOKENS)
    continuations: Continuations = Field(default=(), max_length=limits.MAX_CONTINUATIONS)
    """For kind "score": the texts whose likelihood after the prompt is asked for."""
    pooling: Pooling = Pooling.LAST
    """For kind "embedding"."""
    normalize: bool = True
    """For kind "embedding": whether the vector is scaled to length 1."""
    sampling: SamplingParams = SamplingParams()
    max_tokens: int = Field(ge=1, le=limits.MAX_NEW_TOKENS, strict=True)
    min_tokens: int = Field(default=0, ge=0, le=limits.MAX_NEW_TOKENS, strict=True)
    """No end-of-sequence token, stop token or stop string ends the text before this many."""
    stop: StopStrings = Field(default=(), max_length=limits.MAX_STOP_STRINGS)
    include_stop_str: bool = False
    """The stop string that ends the text stays in it."""
    stop_token_ids: TokenIds = Field(default=(), max_length=limits.MAX_STOP_TOKEN_IDS)
    ignore_eos: bool = False
    logprobs: int | None = Field(default=None, ge=0, le=limits.MAX_TOP_LOGPROBS, strict=True)
    """Tell each output token's logprob, and those of this many likeliest tokens.

    They are the model's own: before biases, penalties, filters and temperature.
    """
    prompt_logprobs: int | None = Field(default=None, ge=0, le=limits.MAX_TOP_LOGPROBS, strict=True)
    """Tell the logprob of each prompt token but the first, and of so many likeliest ones there.

    No cached prefix can stand in for tokens that are told: the prompt is computed as a whole.
    """
    response_format: ResponseFormat | None = None
    """What the output has to look like; it ends where the format is complete.

    With split_channels a model that marks its reasoning may reason before it, as it likes: the
    format is that of the content. Without, it is that of the whole output.
    """
    priority: Priority = Priority.NORMAL
    deadline_s: float | None = Field(default=None, gt=0)
    """Seconds from the job's first `started` entry, by Redis' clock."""
    expires_at: float | None = Field(default=None, gt=0)
    """Unix time in seconds by Redis' clock; a job still queued then ends as `expired`."""
    namespace: Name = "default"
    """Isolates queues and prefix-cache entries."""
    stream: StreamMode = StreamMode.DELTAS
    split_channels: bool = True
    """Tell reasoning and tool calls apart from content, where the model marks them."""
    tools: Annotated[tuple[dict[str, Any], ...], FailFast()] = ()
    """What the prompt offers, as in chat requests: some models' arguments get their types here."""
    tool_choice: ToolChoice = "auto"
    """Whether the reply has to call one of them. `required`, or a tool by its name, is enforced
    like a response format, for models that write calls as JSON between markers."""
    parallel_tool_calls: bool = True
    """Whether a reply may hold more than one call. If not, the end of the first one ends it."""
    metadata: dict[str, Any] = Field(default_factory=dict)
    """Opaque to us, echoed in the first and the last event."""
    tokenizer_fingerprint: str | None = Field(default=None, max_length=128)
    """A worker whose tokenizer has another fingerprint fails the job instead of guessing."""

    @field_validator("stop")
    @classmethod
    def _stop_strings_are_bounded_together(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        num_chars = sum(map(len, value))
        if num_chars > limits.MAX_STOP_CHARS:
            raise ValueError(
                f"has {num_chars} characters together; at most {limits.MAX_STOP_CHARS}"
            )
        return value

    @field_validator("metadata", "tools")
    @classmethod
    def _is_small_json(cls, value: Any, info: ValidationInfo) -> Any:
        most = (
            limits.MAX_METADATA_BYTES if info.field_name == "metadata" else limits.MAX_TOOLS_BYTES
        )
        size = json_size(value)
        if size > most:
            raise ValueError(f"is {size} bytes as JSON; at most {most}")
        return value

    @property
    def num_tokens_in_all(self) -> int:
        """Tokens that it may make a worker compute: what it counts for among its equals.

        The prompt is computed once, whatever number of texts follow it.
        """
        num_new = max(self.sampling.n * self.max_tokens, sum(map(len, self.continuations)))
        return len(self.prompt_token_ids) + num_new

    @property
    def num_tokens_at_most(self) -> int:
        """Tokens that the longest of its sequences may come to."""
        longest = max(map(len, self.continuations), default=0)
        return len(self.prompt_token_ids) + max(self.max_tokens, longest)

    @model_validator(mode="after")
    def _kind_fits(self) -> Self:
        if (self.kind is JobKind.SCORE) != bool(self.continuations):
            raise ValueError('continuations are what kind "score" takes, one at least')
        if self.kind is JobKind.GENERATE:
            return self
        if self.max_tokens != 1 or self.sampling.n != 1:
            raise ValueError(f'kind "{self.kind}" generates nothing: max_tokens and n must be 1')
        fields = type(self).model_fields
        for name in _OF_GENERATIONS_ONLY:
            if getattr(self, name) != fields[name].default:
                raise ValueError(f'{name} means nothing to kind "{self.kind}": leave it out')
        return self

    @property
    def forced_tools(self) -> tuple[dict[str, Any], ...]:
        """The tools of which the reply has to call one; none where it need not."""
        if self.tool_choice == "required":
            return self.tools
        if isinstance(self.tool_choice, NamedTool):
            wanted = self.tool_choice.function.name
            return tuple(tool for tool in self.tools if tool_name(tool) == wanted)[:1]
        return ()

    @property
    def may_call_in_parallel(self) -> bool:
        """Whether a reply that has to call may call more than once; a named tool is called once."""
        return self.parallel_tool_calls and self.tool_choice == "required"

    @property
    def ends_after_call(self) -> bool:
        """Whether a reply that may call ends with its first call; a forced one ends anyway."""
        return not self.parallel_tool_calls and self.tool_choice == "auto"

    @property
    def is_enforced(self) -> bool:
        """Whether a grammar decides which tokens the output may hold."""
        return self.response_format is not None or bool(self.forced_tools)

    @model_validator(mode="after")
    def _tool_choice_fits(self) -> Self:
        is_forced = self.tool_choice not in ("none", "auto")
        if not is_forced:
            self._check_single_call()
            return self
        if not self.forced_tools:
            named = [tool_name(tool) for tool in self.tools]
            raise ValueError(
                f"tool_choice asks for a call, and tools has none such; it has {named}"
            )
        if any(tool_name(tool) is None for tool in self.forced_tools):
            raise ValueError("tools: a tool that has to be called needs a function.name")
        if self.response_format is not None or not self.split_channels:
            raise ValueError(
                "tool_choice asks for a call: it goes with split_channels, and without"
                " response_format"
            )
        return self

    def _check_single_call(self) -> None:
        if not (self.ends_after_call and self.tools):
            return
        if not self.split_channels:
            raise ValueError(
                "parallel_tool_calls=false needs split_channels: calls are not told apart without"
            )
        if self.min_tokens:
            raise ValueError(
                "parallel_tool_calls=false ends the output with its first call: give no"
                f" min_tokens ({self.min_tokens}) with it"
            )

    @model_validator(mode="after")
    def _format_decides_on_the_end(self) -> Self:
        if self.is_enforced and (self.min_tokens or self.ignore_eos):
            field = "response_format" if self.response_format is not None else "tool_choice"
            raise ValueError(
                f"{field} decides where the output ends: give neither min_tokens"
                f" ({self.min_tokens}) nor ignore_eos ({str(self.ignore_eos).lower()}) with it"
            )
        return self

    @model_validator(mode="after")
    def _min_tokens_fit(self) -> Self:
        if self.min_tokens > self.max_tokens:
            raise ValueError(
                f"min_tokens ({self.min_tokens}) must not exceed max_tokens ({self.max_tokens})"
            )
        return self
