"""How OpenAI's request fields become a job's. The one place to extend when the engine can more.

A field passes by its own name where SamplingParams or GenerationJob has it. What neither has is
refused by name, unless its value asks for nothing: text that silently lacks what was asked for
would be worse than an error.
"""

from collections.abc import Callable, Mapping
from typing import Any, Final

from headwater.schemas import GenerationJob, SamplingParams

from .errors import ApiError

_JOB_FIELDS: Final = frozenset(
    {
        "deadline_s",
        "expires_at",
        "ignore_eos",
        "include_stop_str",
        "max_tokens",
        "metadata",
        "min_tokens",
        "priority",
        "split_channels",
        "stop_token_ids",
    }
    & GenerationJob.model_fields.keys()
)
"""GenerationJob's fields that a caller of OpenAI's routes may set. The others are ours to fill."""

_SAMPLING_FIELDS: Final = frozenset(SamplingParams.model_fields)

_ASKS_FOR_NOTHING: Final[Mapping[str, tuple[Any, ...]]] = {
    "best_of": (1,),
    "echo": (False,),
    "frequency_penalty": (0,),
    "function_call": ("none",),
    "functions": ([],),
    "logit_bias": ({},),
    "modalities": (["text"],),
    "parallel_tool_calls": (True,),
    "presence_penalty": (0,),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
}
"""Values with which a field that we don't have changes nothing."""

_ABOUT_THE_CALLER: Final = frozenset({"prompt_cache_key", "safety_identifier", "user"})
"""They identify a caller's own users; by definition no text depends on them."""


def job_fields(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return GenerationJob's fields for OpenAI's; raises ApiError for one that we don't have.

    A null is OpenAI's way to leave a field out. Values are checked by GenerationJob itself.
    """
    sampling: dict[str, Any] = {"temperature": 1.0}  # OpenAI's default
    fields: dict[str, Any] = {}
    for name, value in given.items():
        if value is None or name in _ABOUT_THE_CALLER:
            continue
        if name in _TRANSLATED:
            _TRANSLATED[name](value, fields)
        elif name in _SAMPLING_FIELDS:
            sampling[name] = value
        elif name in _JOB_FIELDS:
            fields[name] = value
        elif name in ("logprobs", "top_logprobs"):
            continue
        elif value not in _ASKS_FOR_NOTHING.get(name, ()):
            raise ApiError(
                400,
                f"{name!r} is not supported by this server: leave it out",
                code="unsupported_parameter",
                param=name,
            )
    return {**fields, **_logprobs(given), "sampling": sampling}


def _logprobs(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the job's `logprobs`: a chat says whether and how many, a completion how many."""
    asked, top = given.get("logprobs"), given.get("top_logprobs")
    if top and asked is not True:
        raise ApiError(
            400, "top_logprobs needs logprobs to be true", code="invalid_value", param="logprobs"
        )
    if asked is None or asked is False:
        return {}
    return {"logprobs": (top or 0) if asked is True else asked}


def _response_format(value: Any, fields: dict[str, Any]) -> None:
    kind = value.get("type") if isinstance(value, dict) else None
    if kind == "text":
        return
    if kind == "json_schema":
        # OpenAI wraps the schema; its name and description are for OpenAI's models only.
        wrapped = value.get("json_schema")
        schema = wrapped.get("schema") if isinstance(wrapped, dict) else None
        if not isinstance(schema, dict):
            raise ApiError(
                422,
                "response_format.json_schema.schema: must be an object",
                code="invalid_value",
                param="response_format",
            )
        value = {"type": kind, "json_schema": schema}
    fields["response_format"] = value


def _stop(value: Any, fields: dict[str, Any]) -> None:
    fields["stop"] = (value,) if isinstance(value, str) else value


def _max_completion_tokens(value: Any, fields: dict[str, Any]) -> None:
    fields["max_tokens"] = value


_TRANSLATED: Final[Mapping[str, Callable[[Any, dict[str, Any]], None]]] = {
    "max_completion_tokens": _max_completion_tokens,
    "response_format": _response_format,
    "stop": _stop,
}
"""Fields whose name or form differs from ours."""
