"""From a request's text, messages or token ids to prompts of token ids."""

from collections.abc import Mapping
from typing import Annotated, Any, TypeAlias

import orjson
from pydantic import Field

from ..errors import TokenizationError
from ..tokenization import Tokenizer
from .errors import ApiError

TokenIds: TypeAlias = Annotated[list[Annotated[int, Field(strict=True, ge=0)]], Field(min_length=1)]
Prompt: TypeAlias = str | TokenIds | Annotated[list[str] | list[TokenIds], Field(min_length=1)]
"""What `/v1/completions` takes: one prompt or many, as text or token ids."""

_MAX_PROMPTS = 128


def encode_prompts(tokenizer: Tokenizer, prompt: Prompt) -> list[list[int]]:
    """Return the token ids of each prompt; raises ApiError."""
    prompts = _as_list(prompt)
    if len(prompts) > _MAX_PROMPTS:
        raise ApiError(400, f"{len(prompts)} prompts in a request; at most {_MAX_PROMPTS}")
    return [
        _not_empty(tokenizer.encode(each)) if isinstance(each, str) else each for each in prompts
    ]


def encode_messages(
    tokenizer: Tokenizer, messages: list[dict[str, Any]], variables: Mapping[str, Any]
) -> list[int]:
    """Return the token ids of a chat; *variables* go to the template. Raises ApiError."""
    try:
        chat = [_plain_message(message) for message in messages]
        return _not_empty(tokenizer.encode_chat(chat, **variables))
    except TokenizationError as error:
        raise ApiError(400, str(error), code="invalid_messages", param="messages") from error
    except TypeError as error:
        # A template variable named like a parameter of ours.
        raise ApiError(400, f"chat_template_kwargs: {error}", param="chat_template_kwargs") from (
            error
        )


def _as_list(prompt: Prompt) -> list[str] | list[list[int]]:
    if isinstance(prompt, str):
        return [prompt]
    if isinstance(prompt[0], int):
        return [prompt]
    return prompt


def _not_empty(token_ids: list[int]) -> list[int]:
    if not token_ids:
        raise ApiError(400, "the prompt is empty: it has no tokens", code="empty_prompt")
    return token_ids


def _plain_message(message: dict[str, Any]) -> dict[str, Any]:
    """Return the message in the form that chat templates know."""
    plain = dict(message)
    if plain.get("role") == "developer":
        plain["role"] = "system"  # OpenAI's newer word for it; templates know the older one
    if isinstance(plain.get("content"), list):
        plain["content"] = "\n".join(_text_of(part) for part in plain["content"])
    if isinstance(plain.get("tool_calls"), list):
        plain["tool_calls"] = [_plain_call(call) for call in plain["tool_calls"]]
    return plain


def _text_of(part: Any) -> str:
    if isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    kind = part.get("type") if isinstance(part, dict) else type(part).__name__
    raise ApiError(
        400, f"content of type {kind!r} is not supported: text only", param="messages.content"
    )


def _plain_call(call: Any) -> Any:
    # OpenAI passes arguments as a string of JSON; templates print an object.
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = orjson.loads(function["arguments"])
    except orjson.JSONDecodeError:
        return call
    return {**call, "function": {**function, "arguments": arguments}}
