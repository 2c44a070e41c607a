"""PrefillBatch: rows that get several tokens each in one forward."""

from collections.abc import Sequence as Seq

import mlx.core as mx

from ..segments import KVSegment, LayerKV, copy_tokens
from .batch import LayerCache, Step
from .coalescing import Coalescer
from .kinds import ModelLayers
from .layout import by_level, find_spans
from .page_index import LayerPages
from .recurrent import StateBatch
from .row import Row


class PrefillBatch:
    """Computes into segments of the rows' own: no buffer, no padding that stays.

    The own keys of this forward are the new tokens'; what the row has computed before is
    attended over like a shared segment that no other row uses.
    """

    def __init__(self, rows: Seq[Row], num_new: Seq[int], layers: ModelLayers) -> None:
        self._rows = rows
        self._num_new = num_new
        self._new: list[LayerKV | None] = [None] * len(layers.attention)
        for row in rows:
            row.solidify()
        starts = [row.num_tokens for row in rows]
        self.step = Step(starts, starts, num_new, max(num_new))
        spans = find_spans([(*row.prefix, *row.private) for row in rows])
        # A conversation's turns are short segments, each a pass of its own: copies, for this
        # forward only, are cheaper.
        self.depths = by_level(Coalescer().coalesce(spans))
        self.layers = [LayerCache(self, *layer) for layer in enumerate(layers.windows)]
        self.states = StateBatch(layers.recurrent, [row.states for row in rows])
        self.states.prepare(num_new)

    def update(self, layer: int, keys: mx.array, values: mx.array) -> LayerKV:
        """Keep the new keys and values, and return them."""
        self._new[layer] = kv = LayerKV(keys, values)
        return kv

    def pages(self, layer: int, window: int | None) -> list[LayerPages]:  # noqa: ARG002 - see solidify()
        """Return nothing: rows have no pages."""
        return []

    def finish(self) -> None:
        """Give each row its new tokens, without the pads, and its states."""
        for index, (row, num_tokens) in enumerate(zip(self._rows, self._num_new, strict=True)):
            at = slice(index, index + 1)
            row.set_states(self.states.row(index))
            layers = (kv for kv in self._new if kv is not None)
            row.append(
                KVSegment(
                    tuple(
                        LayerKV(*(copy_tokens(array[at], 0, num_tokens) for array in kv))
                        for kv in layers
                    )
                )
            )
