"""What queries see of the keys before their own: all of them, or those in a sliding window.

A query at position q sees the keys at (q - window, q].
"""

from collections.abc import Sequence as Seq
from typing import Final, NamedTuple

import mlx.core as mx

from .layout import Span

_GRAIN: Final = 64
"""A view starts at multiples of so many tokens: it moves with each token otherwise, and a device's
graph cache holds few shapes."""


class View(NamedTuple):
    """What is to be computed of a shared segment."""

    span: Span
    first_token: int
    """Nobody sees the segment's tokens before it."""
    mask: mx.array | None
    """(rows, 1, queries, tokens): who sees which of the others; None: everyone all."""


def views(
    depths: Seq[Seq[Span]], starts: Seq[int], num_new: Seq[int], window: int | None
) -> list[list[View]]:
    """Return what rows see that compute *num_new* tokens from positions *starts* on.

    Segments that are out of everyone's sight are left out.
    """
    if window is None:
        return [[View(span, 0, None) for span in depth] for depth in depths]
    seen = [
        [view for span in depth if (view := _view(span, starts, num_new, window))]
        for depth in depths
    ]
    return [depth for depth in seen if depth]


def first_seen(position: int, window: int | None) -> int:
    """Return the first position that the query at *position* sees."""
    return 0 if window is None else max(0, position - window + 1)


def _view(span: Span, starts: Seq[int], num_new: Seq[int], window: int) -> View | None:
    rows = range(span.first_row, span.last_row)
    first = first_seen(min(starts[row] for row in rows), window) - span.first_token
    if first >= span.segment.num_tokens:
        return None
    first = max(0, first) // _GRAIN * _GRAIN
    last_query = max(starts[row] + num_new[row] - 1 for row in rows)
    if span.first_token + first >= first_seen(last_query, window):
        return View(span, first, None)
    keys = mx.arange(span.first_token + first, span.first_token + span.segment.num_tokens)
    queries = mx.array([starts[row] for row in rows])[:, None] + mx.arange(max(num_new))
    return View(span, first, (keys > queries[:, :, None] - window)[:, None])
