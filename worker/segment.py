"""What a model's cache lets us store of computed tokens: shared by prefix cache and engine."""

from enum import Enum, auto
from typing import Protocol, Self


class CacheKind(Enum):
    """What a model's cache lets a prefix cache store."""

    SEGMENTS = auto()
    """Keys and values of any token range: a match may end anywhere."""
    SNAPSHOTS = auto()
    """Keys and values of the layers that have plain ones, and the state of all others (sliding
    windows, recurrent layers) at a segment's end: a match ends where there is a state."""


class Segment(Protocol):
    """What is kept of a token range; of all tokens before it, its predecessors. Immutable."""

    @property
    def num_tokens(self) -> int:
        """Length of the token range."""
        ...

    @property
    def nbytes(self) -> int:
        """Real bytes held, a slice's whole parent included where it is kept alive."""
        ...

    @property
    def is_resumable(self) -> bool:
        """Whether a row can go on at its end; with SEGMENTS always."""
        ...

    def split(self, position: int) -> tuple[Self, Self]:
        """Cut at *position*, 0 < position < num_tokens; both halves own their memory.

        A row can go on at the end of the first half only with SEGMENTS.
        """
        ...

    def resumable_as(self, other: Self) -> Self:
        """Return this segment with the state at the end of *other*, which ends where it ends."""
        ...
