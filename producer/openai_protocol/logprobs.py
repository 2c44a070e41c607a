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


def _token(token: TokenLogprob) -> dict[str, Any]:
    data = token.text.encode() if token.bytes is None else base64.b64decode(token.bytes)
    return {"token": token.text, "logprob": _number(token), "bytes": list(data)}


def _number(token: TokenLogprob) -> float:
    return _NO_PROBABILITY if token.logprob is None else token.logprob
