"""Coalescer: adjacent short shared segments, which would cost a pass each, as one."""

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from typing import Final

import mlx.core as mx

from ..segments import KVSegment
from .layout import Span
from .row import MAX_ABSORBED_TOKENS, merged

MAX_COALESCED_TOKENS: Final = 512
"""Of one copy: the prefix cache holds the same tokens, so that what rows share lies twice."""


class Coalescer:
    """Copies of runs of short segments that the same rows start with, while they decode.

    A conversation's prefix is a chain of nodes, a few tokens each: one copy makes one pass of
    them in every layer. Copies are kept from group to group as long as they are wanted.
    """

    def __init__(self) -> None:
        self._copies: dict[tuple[int, ...], tuple[list[KVSegment], KVSegment]] = {}
        """By the ids of the segments, which are held along so that ids stay theirs."""

    @property
    def arrays(self) -> list[mx.array]:
        """The copies."""
        return [array for _, copy in self._copies.values() for array in copy.arrays]

    def clear(self) -> None:
        """Forget all copies."""
        self._copies = {}

    def coalesce(self, spans: Seq[Span]) -> list[Span]:
        """Return spans of the same tokens and rows, fewer where several short ones are adjacent.

        Copies that *spans* don't ask for are forgotten.
        """
        copies = {}
        coalesced = []
        for run in _runs(spans):
            if len(run) == 1:
                coalesced += run
                continue
            segments = [span.segment for span in run]
            key = tuple(map(id, segments))
            copies[key] = self._copies.get(key) or (segments, merged(segments))
            coalesced.append(run[0]._replace(segment=copies[key][1]))
        self._copies = copies
        return coalesced


def _runs(spans: Seq[Span]) -> Iterator[list[Span]]:
    """Yield *spans* in runs of adjacent ones to be put together."""
    chains: dict[tuple[int, int], list[Span]] = {}
    for span in spans:
        # Of the trie's nodes those with the same rows are a chain, each below the last.
        chains.setdefault((span.first_row, span.last_row), []).append(span)
    for chain in chains.values():
        run: list[Span] = []
        for span in chain:
            if run and not _can_join(run, span):
                yield run
                run = []
            run.append(span)
        yield run


def _can_join(run: Seq[Span], span: Span) -> bool:
    lengths = [each.segment.num_tokens for each in (*run, span)]
    return max(lengths) <= MAX_ABSORBED_TOKENS and sum(lengths) <= MAX_COALESCED_TOKENS
