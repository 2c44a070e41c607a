"""MemoryPlanner: one budget for rows, their growth, the prefix cache and activations."""

import sys
from collections.abc import Iterable
from typing import Final, Generic, TypeVar

from ..prefix_cache import PrefixCache
from ..segment import Segment
from ..sequence import Sequence
from .settings import SchedulerSettings

S = TypeVar("S", bound=Segment)

_TOLERATED_SHARE: Final = 0.05
"""Of the budget: nobody has to go because the engine's memory grows in steps."""


class MemoryPlanner(Generic[S]):
    """Answers whether something fits, and evicts cached prefixes so that it does.

        budget >= rows with their growth + activations of a prefill step + cache

    A step that reads prompts (scores, prompt logprobs) holds logits of theirs besides.

    Sizes of rows are planned ones: what a row will hold soon, not what it holds now. Where the
    engine holds more already (pads, free pages, copies of what is also cached), that counts.
    """

    def __init__(self, cache: PrefixCache[S], settings: SchedulerSettings) -> None:
        self._cache = cache
        self.shares_prefix = settings.footprint.shares_prefix
        """Whether rows live on what they have pinned, so that they must keep it pinned. States,
        which every row changes, are copied all the same."""
        self._footprint = settings.footprint
        self._growth_tokens = settings.growth_tokens
        self._max_bytes = settings.max_bytes
        self._rows_nbytes = 0
        self._extra_nbytes = 0
        """What the engine held when the plan was begun, above what its rows were to hold then."""
        self._left_nbytes = 0
        """What it may keep of the rows that go in this plan."""
        self._prefill_nbytes = 0
        self._num_read = 0
        """Rows whose prompt is read."""
        self._commit_nbytes = 0

    def begin(self, running: Iterable[Sequence], num_prefill_tokens: int, held_nbytes: int) -> None:
        """Start the plan of a step: these rows grow, so many prompt tokens are computed.

        *held_nbytes* is what the engine holds of the rows now.
        """
        self._rows_nbytes = self._num_read = 0
        known_nbytes = 0
        for sequence in running:
            self.add_row(sequence)
            known_nbytes += self._footprint.row_nbytes(
                sequence.num_computed_tokens, _num_shared(sequence)
            )
        self._extra_nbytes = max(0, held_nbytes - known_nbytes)
        self._left_nbytes = 0
        self._prefill_nbytes = self._footprint.bytes_per_prefill_token * num_prefill_tokens
        self._commit_nbytes = 0

    def add_row(self, sequence: Sequence) -> None:
        """Count the row of a sequence that has pinned its prefix."""
        self._rows_nbytes += self._row_nbytes(sequence)
        self._num_read += sequence.needs_logits

    def remove_row(self, sequence: Sequence) -> None:
        """Count it no longer, but for what the engine keeps; its prefix must still be pinned."""
        nbytes = self._row_nbytes(sequence)
        self._rows_nbytes -= nbytes
        most = self._footprint.spare_nbytes(self._rows_nbytes)
        self._left_nbytes = min(self._left_nbytes + nbytes, most)
        self._num_read -= sequence.needs_logits

    @property
    def is_over(self) -> bool:
        """Whether the rows do not fit, even with all evicted that can be."""
        return self._excess_nbytes() > self._extra_nbytes

    @property
    def holds_too_much(self) -> bool:
        """Whether what they hold does not fit, by more than what may come and go with a step."""
        return self._max_bytes is not None and (
            self._excess_nbytes() > _TOLERATED_SHARE * self._max_bytes
        )

    def fits(self, sequence: Sequence, num_matched_tokens: int) -> bool:
        """Whether one more row fits that starts with so many cached tokens."""
        pinned = self._footprint.bytes_per_token * num_matched_tokens
        # Commits of this plan are not in the cache yet, so they cannot be evicted for it.
        extra = min(pinned, self._cache.evictable_nbytes) + self._commit_nbytes
        if sequence.needs_logits and not self._num_read:
            extra += self._footprint.reading_nbytes
        return self._excess_nbytes() + extra + self._grown(sequence, num_matched_tokens) <= 0

    def evict(self) -> None:
        """Evict what the rows leave no room for."""
        self.make_free(0)

    def plan_commit(self, start: int, end: int) -> bool:
        """Make room in the cache for tokens [start, end), and count them, if they fit at all."""
        nbytes = self._footprint.commit_nbytes(start, end)
        if not self.make_free(nbytes):
            return False
        self._commit_nbytes += nbytes
        return True

    def committed(self) -> None:
        """Note that the planned commits have been carried out: the cache counts them now."""
        self._commit_nbytes = 0

    def make_free(self, nbytes: int) -> bool:
        """Evict until so many bytes are free; return whether they are."""
        if self._max_bytes is None:
            return True
        planned = self._planned_nbytes + self._left_nbytes + self._commit_nbytes
        free = self._max_bytes - planned - self._cache.nbytes
        if free < nbytes:
            free += self._cache.evict(nbytes - free)
        return free >= nbytes

    @property
    def _planned_nbytes(self) -> int:
        return self._rows_nbytes + self._extra_nbytes + self._activation_nbytes

    @property
    def _activation_nbytes(self) -> int:
        return self._prefill_nbytes + (self._footprint.reading_nbytes if self._num_read else 0)

    def _excess_nbytes(self) -> int:
        # Commits are left out: those of rows that go can be evicted in the next step. What is
        # kept of rows that go is for those that come.
        if self._max_bytes is None:
            return -sys.maxsize
        return self._planned_nbytes + self._cache.pinned_nbytes - self._max_bytes

    def _row_nbytes(self, sequence: Sequence) -> int:
        return self._grown(sequence, _num_shared(sequence))

    def _grown(self, sequence: Sequence, num_shared_tokens: int) -> int:
        growth = max(0, min(sequence.num_remaining_tokens, self._growth_tokens))
        return self._footprint.row_nbytes(sequence.num_tokens + growth, num_shared_tokens)


def _num_shared(sequence: Sequence) -> int:
    return sequence.cache_node.end if sequence.cache_node else 0
