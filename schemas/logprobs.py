"""How likely tokens were, as the model had it."""

from typing import Self

from pydantic import Field

from .base import WireModel
from .job import TokenId


class TokenLogprob(WireModel):
    """A token and the logarithm of its probability, as the model had it."""

    token_id: TokenId
    logprob: float | None = None
    """None where the model gave it no probability at all."""
    text: str
    """What the token adds to a text, special tokens by name; bytes that are no UTF-8 by
    themselves are replaced."""
    bytes: str | None = None
    """The token's bytes in base64, where *text* had to replace some."""


class PositionLogprobs(TokenLogprob):
    """The token that stands at one position of the output, or of the prompt."""

    top: tuple[TokenLogprob, ...] = ()
    """The likeliest tokens there, as many as the job asked for; the chosen one may be of them."""


class PromptPart(WireModel):
    """Logprobs of prompt tokens. Those of a long prompt come in many parts."""

    start: int = Field(ge=1)
    """Prompt tokens before these; nothing precedes the first one, so it has no logprob."""
    logprobs: tuple[PositionLogprobs, ...]

    @property
    def end(self) -> int:
        """Prompt tokens up to here."""
        return self.start + len(self.logprobs)

    def after(self, num_positions: int) -> Self:
        """Return what is left behind the first *num_positions*."""
        return self.model_copy(
            update={
                "start": self.start + num_positions,
                "logprobs": self.logprobs[num_positions:],
            }
        )
