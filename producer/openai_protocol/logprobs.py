"""Logprobs as OpenAI's two text routes tell them."""

import base64
from collections.abc import Sequence
from typing import Any, Final

from headwater.schemas.logprobs import PositionLogprobs, TokenLogprob

_NO_PROBABILITY: Final = -9999.0
"""OpenAI's number for a token that the model gave no probability at all; JSON has no -inf."""


def chat_logprobs(positions: Sequence[PositionLogprobs]) -> dict[str, Any]:
    """Return the `logprobs` of a chat's choice."""
    content = [
        {**_token(position), "top_logprobs": [_token(each) for each in position.top]}
        for position in positions
    ]
    return {"content": content, "refusal": None}


def completion_logprobs(positions: Sequence[PositionLogprobs], offset: int) -> dict[str, Any]:
    """Return the `logprobs` of a completion's choice whose first token stands at *offset*."""
    offsets = []
    for position in positions:
        offsets.append(offset)
        offset += len(position.text)
    return {
        "tokens": [position.text for position in positions],
        "token_logprobs": [_number(position) for position in positions],
        "top_logprobs": [
            {each.text: _number(each) for each in position.top} for position in positions
        ],
        "text_offset": offsets,
    }


def prompt_logprobs(positions: Sequence[PositionLogprobs]) -> list[dict[str, Any] | None]:
    """Return a prompt's logprobs as vLLM's server gives them.

    A map by token id for each position: of the likeliest tokens, and of the prompt's own. The
    first has none. Ranks count from 1; that of a token beyond the likeliest is not known.
    """
    return [None, *map(_position, positions)]


def _position(position: PositionLogprobs) -> dict[str, Any]:
    ranked = list(enumerate(position.top, 1))
    is_among = any(each.token_id == position.token_id for each in position.top)
    tokens: list[tuple[int | None, TokenLogprob]] = [*ranked]
    if not is_among:
        tokens.append((None, position))
    return {
        str(token.token_id): {
            "logprob": _number(token),
            "rank": rank,
            "decoded_token": token.text,
        }
        for rank, token in tokens
    }


def _token(token: TokenLogprob) -> dict[str, Any]:
    data = token.text.encode() if token.bytes is None else base64.b64decode(token.bytes)
    return {"token": token.text, "logprob": _number(token), "bytes": list(data)}


def _number(token: TokenLogprob) -> float:
    return _NO_PROBABILITY if token.logprob is None else token.logprob
