"""What kinds of jobs there are, and the results of those that generate nothing."""

import base64
import struct
from enum import StrEnum
from typing import Self

from pydantic import Field

from .base import WireModel


class JobKind(StrEnum):
    """What a job asks for."""

    GENERATE = "generate"
    """Text that continues the prompt."""
    SCORE = "score"
    """How likely each of the given continuations of the prompt is."""
    EMBEDDING = "embedding"
    """The prompt's meaning as a vector."""


class Pooling(StrEnum):
    """How an embedding is made of the last layer's states."""

    LAST = "last"
    """The last token's."""
    MEAN = "mean"
    """The average over all tokens. No cached prefix can stand in for any of them: a cache holds
    keys and values, not the states that are averaged, so the whole prompt is computed."""


class Score(WireModel):
    """How likely one continuation is."""

    continuation: int = Field(ge=0)
    """Its place in the job's list."""
    logprobs: tuple[float, ...]
    """Of each of its tokens, given all before it; natural logarithms."""
    is_greedy: bool
    """Whether each of its tokens is the likeliest at its place: what greedy decoding gives."""

    @property
    def logprob(self) -> float:
        """Of the continuation as a whole."""
        return sum(self.logprobs)


class Embedding(WireModel):
    """A vector."""

    vector: str
    """Little-endian float32 numbers in base64, as OpenAI's encoding_format "base64" has them."""
    dimensions: int = Field(ge=1)

    @classmethod
    def of(cls, data: bytes) -> Self:
        """Wrap little-endian float32 numbers."""
        return cls(vector=base64.b64encode(data).decode("ascii"), dimensions=len(data) // 4)

    def floats(self) -> list[float]:
        """Return the numbers."""
        return list(struct.unpack(f"<{self.dimensions}f", base64.b64decode(self.vector)))
