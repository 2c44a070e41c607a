"""What all layers of a forward have in common, and a layer of it as mlx-lm's models take one."""

from collections.abc import Sequence as Seq
from functools import cached_property
from typing import NamedTuple, NoReturn, Protocol

import mlx.core as mx

from ..segments import LayerKV
from .layout import Span
from .pool import LayerPages


class OwnMask:
    """Which of its own keys a query may see. Only our attention can read it."""

    def __init__(self, array: mx.array) -> None:
        self.array = array

    def __bool__(self) -> NoReturn:
        raise TypeError("the mask of shared prefixes is opaque to models")


class Step:
    """Positions of a forward of rows, right-padded: pads stand behind the row's last token.

    Of the own keys that a layer gets back from update_and_fetch(), the one at *index* has
    position `own_start + index`. Keys in a shared segment and in a page have theirs in order, all
    before a row's queries: where there is no window, no mask is needed for them.
    """

    def __init__(
        self, starts: Seq[int], own_starts: Seq[int], num_new: Seq[int], num_own: int
    ) -> None:
        self.offset = mx.array(list(starts))
        """(rows,): position of each row's first new token."""
        self.next_offset = self.offset + mx.array(list(num_new))
        self.own_start = mx.array(list(own_starts))
        """(rows,): position of the first own key."""
        self._width = max(num_new)
        self._num_own = num_own

    @cached_property
    def query_positions(self) -> mx.array:
        """(rows, queries)."""
        return self.offset[:, None] + mx.arange(self._width)

    @cached_property
    def own_positions(self) -> mx.array:
        """(rows, own keys)."""
        return self.own_start[:, None] + mx.arange(self._num_own)

    @cached_property
    def mask(self) -> OwnMask:
        """Every query sees the own keys up to its own position."""
        visible = self.own_positions[:, None] <= self.query_positions[:, :, None]
        return OwnMask(visible[:, None, None])


class LayerSpan(NamedTuple):
    """One layer of a shared segment, and the rows [first_row, last_row) that start with it."""

    layer: LayerKV
    first_row: int
    last_row: int


class Batch(Protocol):
    """Rows of a forward, in depth-first order."""

    step: Step
    depths: list[list[Span]]

    def update(self, layer: int, keys: mx.array, values: mx.array) -> LayerKV:
        """Take the new keys and values, (rows, heads, queries, D); return the own ones."""
        ...

    def pages(self, layer: int) -> list[LayerPages]:
        """Return the pages to attend over besides."""
        ...


class LayerCache:
    """One layer of a batch, as mlx-lm's models take a cache."""

    def __init__(self, batch: Batch, index: int) -> None:
        self._batch = batch
        self._index = index
        self.offset = batch.step.offset

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> LayerKV:
        """Take the new tokens' keys and values; return the own ones, see Step."""
        self.offset = self._batch.step.next_offset
        return self._batch.update(self._index, keys, values)

    def make_mask(
        self,
        _num_queries: int,
        return_array: bool = False,  # noqa: ARG002  # mlx-lm's protocol names it
        window_size: int | None = None,
    ) -> OwnMask:
        """Return the step's mask; TypeError for a sliding window."""
        if window_size is not None:
            raise TypeError("a sliding window can't be used with shared prefixes")
        return self._batch.step.mask

    def pages(self) -> list[LayerPages]:
        """Return this layer of the rows' full pages."""
        return self._batch.pages(self._index)

    def shared(self) -> list[list[LayerSpan]]:
        """Return this layer of the shared segments, one list for each depth of the trie."""
        return [
            [LayerSpan(span.segment.layers[self._index], *span[1:]) for span in depth]
            for depth in self._batch.depths
        ]
