"""Which rows stand where, and which range of them a shared segment covers."""

from collections.abc import Sequence as Seq
from typing import NamedTuple

from ..segments import KVSegment


class Span(NamedTuple):
    """A shared segment and the rows [first_row, last_row) that start with it."""

    segment: KVSegment
    first_row: int
    last_row: int
    first_token: int
    """Position of the segment's first token."""


def depth_first(prefixes: Seq[Seq[KVSegment]]) -> list[int]:
    """Return the indices of *prefixes* so that takers of one segment stand side by side.

    Segments are told apart by identity; the order of first appearance decides between siblings.
    """
    place: dict[int, int] = {}
    for prefix in prefixes:
        for segment in prefix:
            place.setdefault(id(segment), len(place))
    return sorted(
        range(len(prefixes)), key=lambda index: [place[id(node)] for node in prefixes[index]]
    )


def find_spans(prefixes: Seq[Seq[KVSegment]]) -> list[Span]:
    """Return one span for each node of the trie of *prefixes*, which stand in its order."""
    spans: list[Span] = []
    for depth in range(max(map(len, prefixes), default=0)):
        first = 0
        while first < len(prefixes):
            last = first + 1
            path = _path(prefixes[first], depth)
            while last < len(prefixes) and _path(prefixes[last], depth) == path:
                last += 1
            if len(path) > depth:
                before = sum(segment.num_tokens for segment in prefixes[first][:depth])
                spans.append(Span(prefixes[first][depth], first, last, before))
            first = last
    return spans


def by_level(spans: Seq[Span]) -> list[list[Span]]:
    """Share out spans to few levels, in each of which they cover different rows, in order."""
    levels: list[list[Span]] = []
    for span in spans:
        level = next((level for level in levels if _has_room(level, span)), None)
        if level is None:
            levels.append([span])
        else:
            level.append(span)
    return [sorted(level, key=lambda span: span.first_row) for level in levels]


def pack(lengths: Seq[int], max_pad_share: float = 0.2) -> list[list[int]]:
    """Share out chunks of *lengths* to right-padded forwards; returns their indices.

    Longest first, so that a forward's width is known when it is opened; of its tokens at most
    *max_pad_share* are pads.
    """
    forwards: list[list[int]] = []
    used = 0
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        if forwards:
            area = lengths[forwards[-1][0]] * (len(forwards[-1]) + 1)
            if area - used - lengths[index] <= max_pad_share * area:
                forwards[-1].append(index)
                used += lengths[index]
                continue
        forwards.append([index])
        used = lengths[index]
    return forwards


def _path(prefix: Seq[KVSegment], depth: int) -> list[int]:
    return [id(segment) for segment in prefix[: depth + 1]]


def _has_room(level: Seq[Span], span: Span) -> bool:
    return all(
        span.last_row <= other.first_row or other.last_row <= span.first_row for other in level
    )
