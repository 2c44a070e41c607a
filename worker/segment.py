"""What a model's cache lets us store of computed tokens: shared by prefix cache and engine."""

from enum import Enum, auto
from typing import Protocol, Self


class CacheKind(Enum):
    """What a model's cache lets a prefix cache store."""

    SEGMENTS = auto()
    """Keys and values of any token range: a match may end anywhere."""
    SNAPSHOTS = auto()
    """Whole states only (sliding windows, recurrent and hybrid models)."""


class Segment(Protocol):
    """Keys and values of a token range, or a whole state at its end. Immutable.

    A whole state covers all tokens from the first, so its length is its position.
    """

    @property
    def num_tokens(self) -> int:
        """Length of the token range."""
        ...

    @property
    def nbytes(self) -> int:
        """Real bytes held, a slice's whole parent included where it is kept alive."""
        ...

    def split(self, position: int) -> tuple[Self, Self]:
        """Cut at *position*, 0 < position < num_tokens; both halves own their memory."""
        ...
