"""The bodies of the text routes, and the jobs that they ask for."""

from typing import Any, Protocol

from headwater.schemas import GenerationJob, ModelCard, Priority, SchemaError, StreamMode
from pydantic import BaseModel, ConfigDict, Field

from ..client import new_job
from ..errors import PromptTooLong
from ..tokenization import Tokenizer
from .caller import Caller
from .errors import ApiError, of_schema
from .fields import job_fields
from .prompts import Prompt, encode_messages, encode_prompts

_COMPLETION_TOKENS = 16
"""OpenAI's default for /v1/completions; a chat may fill the context."""


class StreamOptions(BaseModel):
    """OpenAI's `stream_options`."""

    model_config = ConfigDict(extra="forbid")

    include_usage: bool = False
    include_obfuscation: bool = False
    """Padding against eavesdroppers who count bytes; we send none, TLS is a proxy's work."""


class TextRequest(BaseModel):
    """What both text routes take; other fields are a job's, see fields.py."""

    model_config = ConfigDict(extra="allow")

    model: str
    stream: bool = False
    stream_options: StreamOptions | None = None
    prompt_logprobs: Any = None
    """vLLM's: GenerationJob checks it. A stream tells it in pieces, which together are the list."""
    cancel_on_disconnect: bool | None = None
    """Whether the job is cancelled when the client goes away; by default where it streams."""

    @property
    def job_prompt_logprobs(self) -> Any:
        """What GenerationJob is asked for of the prompt."""
        return self.prompt_logprobs

    @property
    def cancels_on_disconnect(self) -> bool:
        """Whether the job ends with its client."""
        return self.stream if self.cancel_on_disconnect is None else self.cancel_on_disconnect


class CompletionRequest(TextRequest):
    """The body of /v1/completions."""

    prompt: Prompt
    echo: bool = False
    """Whether the text begins with the prompt, and `logprobs` with the prompt's."""

    @property
    def job_prompt_logprobs(self) -> Any:
        """What GenerationJob is asked for of the prompt."""
        if self.prompt_logprobs is None and self.echo:
            return (self.model_extra or {}).get("logprobs")
        return self.prompt_logprobs

    @property
    def own_fields(self) -> dict[str, Any]:
        """GenerationJob's fields that only a completion has: its text is left as it comes."""
        return {"split_channels": False}

    def prompts(self, tokenizer: Tokenizer) -> list[list[int]]:
        """Return the prompts' token ids; raises ApiError."""
        return encode_prompts(tokenizer, self.prompt)

    def max_tokens(self, room: int) -> int:
        """Return how many new tokens a request gets that does not say; *room* is what fits."""
        return min(_COMPLETION_TOKENS, room)


class ChatRequest(TextRequest):
    """The body of /v1/chat/completions."""

    messages: list[dict[str, Any]] = Field(min_length=1)
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """What else the chat template may read: enable_thinking, ..."""
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    parallel_tool_calls: Any = None
    """GenerationJob checks both."""

    @property
    def own_fields(self) -> dict[str, Any]:
        """GenerationJob's fields that only a chat has."""
        given = {
            "tools": self._offered,
            "tool_choice": self.tool_choice,
            # Without tools there is nothing to call in parallel.
            "parallel_tool_calls": self.parallel_tool_calls if self._offered else None,
        }
        return {name: value for name, value in given.items() if value is not None}

    @property
    def _offered(self) -> list[dict[str, Any]] | None:
        return None if self.tool_choice == "none" else self.tools or None

    def prompts(self, tokenizer: Tokenizer) -> list[list[int]]:
        """Return the chat's token ids; raises ApiError."""
        variables = {
            **self.chat_template_kwargs,
            "add_generation_prompt": self.add_generation_prompt and not self.continue_final_message,
            "continue_final_message": self.continue_final_message,
            "tools": self._offered,
        }
        return [encode_messages(tokenizer, self.messages, variables)]

    def max_tokens(self, room: int) -> int:
        """Return how many new tokens a request gets that does not say; *room* is what fits."""
        return room


class Models(Protocol):
    """What must be known of models: a ModelDirectory, or one model for a whole file."""

    def card(self, alias: str, *, refresh: bool = False) -> ModelCard:
        """Return the card behind *alias*; raises UnknownModel."""
        ...

    def tokenizer(self, alias: str) -> Tokenizer:
        """Return the model's tokenizer."""
        ...


def jobs_of(
    request: CompletionRequest | ChatRequest, models: Models, caller: Caller
) -> list[GenerationJob]:
    """Return the jobs that *request* asks for, one a prompt. Reads the model's card anew.

    Raises ApiError, and ProducerError's kinds.
    """
    # A worker may have changed the model behind the alias, and with it the tokenizer.
    card = models.card(request.model, refresh=True)
    tokenizer = models.tokenizer(request.model)
    fields = {**request.own_fields, **job_fields(request.model_extra or {})}
    if request.job_prompt_logprobs is not None:
        fields["prompt_logprobs"] = request.job_prompt_logprobs
    fields |= {
        "namespace": caller.namespace,
        "priority": choose_priority(caller, fields.get("priority")),
        "stream": StreamMode.DELTAS if request.stream else StreamMode.FINAL,
        "tokenizer_fingerprint": tokenizer.fingerprint,
    }
    jobs = []
    for prompt in request.prompts(tokenizer):
        room = card.context_length - len(prompt)
        if room < 1:
            raise PromptTooLong(
                f"the prompt has {len(prompt)} tokens; the context of model {request.model!r} is"
                f" {card.context_length}, new ones included"
            )
        own = {"max_tokens": request.max_tokens(room), **fields}
        jobs.append(_parse(request.model, prompt, own))
    return jobs


def choose_priority(caller: Caller, wanted: Any) -> Priority:
    """Return the class of a caller's job; raises ApiError for one above its own."""
    try:
        priority = Priority(wanted) if wanted is not None else caller.priority
    except ValueError:
        raise ApiError(
            422, "priority: must be high, normal or low", code="invalid_value", param="priority"
        ) from None
    if not caller.allows(priority):
        raise ApiError(
            403,
            f"priority: this key submits with priority {caller.priority.value!r} at most",
            code="priority_not_allowed",
            param="priority",
        )
    return priority


def _parse(model: str, prompt: list[int], fields: dict[str, Any]) -> GenerationJob:
    try:
        return new_job(model, prompt, **fields)
    except SchemaError as error:
        raise of_schema(error) from error
