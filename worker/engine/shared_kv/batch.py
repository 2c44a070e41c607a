"""What all layers of a forward have in common, and a layer of it as mlx-lm's models take one."""

from collections.abc import Sequence as Seq
from functools import cached_property
from typing import NamedTuple, NoReturn, Protocol

import mlx.core as mx

from ..segments import LayerKV
from .layout import Span
from .page_index import LayerPages
from .windows import View, views


class OwnMask:
    """Stands for which keys a query may see. Only our attention can read it."""

    def __init__(self, window: int | None) -> None:
        self.window = window
        """Tokens of a sliding window, None where there is none."""

    def __bool__(self) -> NoReturn:
        raise TypeError("the mask of shared prefixes is opaque to models")


class Step:
    """Positions of a forward of rows, right-padded: pads stand behind the row's last token.

    Of the own keys that a layer gets back from update_and_fetch(), the one at *index* has
    position `own_start + index`. Keys in a shared segment and in a page have theirs in order, all
    before a row's queries: where there is no window, no mask is needed for them. Masks depend on
    the window only, so that all layers with the same one share theirs.
    """

    def __init__(
        self, starts: Seq[int], own_starts: Seq[int], num_new: Seq[int], num_own: int
    ) -> None:
        self.offset = mx.array(list(starts))
        """(rows,): position of each row's first new token."""
        self.next_offset = self.offset + mx.array(list(num_new))
        self.own_start = mx.array(list(own_starts))
        """(rows,): position of the first own key."""
        self.starts = starts
        """Of *offset*, on the host."""
        self._num_new = num_new
        self._num_own = num_own
        self._own_masks: dict[int | None, mx.array] = {}
        self._views: dict[int | None, list[list[View]]] = {}

    @cached_property
    def query_positions(self) -> mx.array:
        """(rows, queries)."""
        return self.offset[:, None] + mx.arange(max(self._num_new))

    @cached_property
    def own_positions(self) -> mx.array:
        """(rows, own keys)."""
        return self.own_start[:, None] + mx.arange(self._num_own)

    def own_mask(self, window: int | None) -> mx.array:
        """Return which own keys a query sees, (rows, 1, 1, queries, own keys)."""
        if window not in self._own_masks:
            keys, queries = self.own_positions[:, None], self.query_positions[:, :, None]
            is_seen = keys <= queries
            if window is not None:
                is_seen &= keys > queries - window
            self._own_masks[window] = is_seen[:, None, None]
        return self._own_masks[window]

    def views(self, depths: Seq[Seq[Span]], window: int | None) -> list[list[View]]:
        """Return what queries see of shared segments; *depths* are the same at every call."""
        if window not in self._views:
            self._views[window] = views(depths, self.starts, self._num_new, window)
        return self._views[window]


class LayerSpan(NamedTuple):
    """One layer of a shared segment, and the rows [first_row, last_row) that start with it."""

    layer: LayerKV
    first_row: int
    last_row: int
    mask: mx.array | None
    """(rows, 1, queries, tokens); None where every query sees every key."""


class Batch(Protocol):
    """Rows of a forward, in depth-first order."""

    step: Step
    depths: list[list[Span]]

    def update(self, layer: int, keys: mx.array, values: mx.array) -> LayerKV:
        """Take the new keys and values, (rows, heads, queries, D); return the own ones."""
        ...

    def pages(self, layer: int, window: int | None) -> list[LayerPages]:
        """Return the pages to attend over besides."""
        ...


class LayerCache:
    """One layer of a batch, as mlx-lm's models take a cache."""

    def __init__(self, batch: Batch, index: int, window: int | None) -> None:
        self._batch = batch
        self._index = index
        self._window = window
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
        """Return a mask for all layers of this layer's kind."""
        return OwnMask(self._window if window_size is None else window_size)

    def window(self, mask: OwnMask) -> int | None:
        """Return the window in which the layer's queries see keys.

        mlx-lm's rotating caches forget what is older than theirs, whatever the mask says.
        """
        windows = [window for window in (self._window, mask.window) if window is not None]
        return min(windows, default=None)

    def own_mask(self, window: int | None) -> mx.array:
        """Return which of the own keys a query sees, (rows, 1, 1, queries, own keys)."""
        return self._batch.step.own_mask(window)

    def pages(self, window: int | None) -> list[LayerPages]:
        """Return this layer of the rows' full pages."""
        return self._batch.pages(self._index, window)

    def shared(self, window: int | None) -> list[list[LayerSpan]]:
        """Return this layer of the shared segments, one list for each depth of the trie."""
        return [
            [self._span(view) for view in depth]
            for depth in self._batch.step.views(self._batch.depths, window)
        ]

    def _span(self, view: View) -> LayerSpan:
        layer, first = view.span.segment.layers[self._index], view.first_token
        if first:
            layer = LayerKV(layer.keys[:, :, first:], layer.values[:, :, first:])
        return LayerSpan(layer, view.span.first_row, view.span.last_row, view.mask)
