"""DecodeGroup: rows that get one token each, step after step."""

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import Final

import mlx.core as mx

from ..segments import KVSegment, LayerKV
from .batch import LayerCache, Step
from .coalescing import Coalescer
from .kinds import ModelLayers
from .layout import by_level, find_spans
from .page_index import LayerPages
from .page_views import PageViews
from .pages import PAGE_TOKENS
from .pool import PagePool
from .recurrent import StateBatch
from .row import Row, join_tokens

TAIL_TOKENS: Final = 2 * PAGE_TOKENS
"""Tails are written at every step: in place where nobody reads them any more, else copied, since
MLX lets go of what a launched step reads only when it is computed. Pages are written once."""


class DecodeGroup:
    """Rows in depth-first order, with a tail (rows, heads, TAIL_TOKENS, D) for each layer.

    When a tail is full, the first page of every tail that has one goes to the pool. Rows that
    join or leave make a new group, which copies tails: never what is in pages or segments.
    """

    def __init__(
        self,
        rows: Seq[Row],
        num_users: Mapping[int, int],
        pool: PagePool,
        coalescer: Coalescer,
        layers: ModelLayers,
    ) -> None:
        self.rows = list(rows)
        self._pool = pool
        pool.tidy()
        loose = [row.absorb(num_users) for row in rows]
        self.depths = by_level(coalescer.coalesce(find_spans([row.prefix for row in rows])))
        self._tails = _take_in(rows, loose, pool, len(layers.attention))
        self.states = StateBatch(layers.recurrent, [row.states for row in rows])
        for index, row in enumerate(rows):
            row.move(self, index)
        self._num_members = len(rows)
        self.is_stale = False
        """Whether a row's prefix is another one now."""
        self._seal_full_tails()
        self._views = PageViews(pool, self.rows)
        self.step = self._next_step()
        self.layers = [LayerCache(self, *layer) for layer in enumerate(layers.windows)]

    @property
    def arrays(self) -> list[mx.array]:
        """The tails and the states."""
        tails = [array for tails in self._tails if tails is not None for array in tails]
        return tails + self.states.arrays

    @property
    def num_held_tokens(self) -> int:
        """Tokens that fit into the tails, also of rows that have left."""
        return TAIL_TOKENS * len(self.rows)

    def is_exactly(self, rows: Seq[Row]) -> bool:
        """Say whether the group holds *rows* and no others, whatever their order."""
        return (
            not self.is_stale
            and len(rows) == len(self.rows)
            and all(row.group is self for row in rows)
        )

    def begin(self) -> None:
        """Prepare a forward of one token a row."""
        self._seal_full_tails()
        self.step = self._next_step()
        self._views.begin()
        for layer in self.layers:
            layer.offset = self.step.offset
        for row in self.rows:
            row.num_tail += 1

    def update(self, layer: int, keys: mx.array, values: mx.array) -> LayerKV:
        """Write the new token behind each row's tail; return the tails."""
        places = (self.step.offset - self.step.own_start)[:, None, None, None]
        old = self._tails[layer]
        tails = [
            _zeros(new) if old is None else old[part] for part, new in enumerate((keys, values))
        ]
        self._tails[layer] = kv = LayerKV(
            *(
                mx.put_along_axis(tail, places, new, axis=2)
                for tail, new in zip(tails, (keys, values), strict=True)
            )
        )
        return kv

    def pages(self, layer: int, window: int | None) -> list[LayerPages]:
        """Return the rows' full pages that are not out of a window's sight."""
        return self._views.layer(layer, window, self.step)

    def tail(self, layer: int, index: int, num_tokens: int) -> LayerKV | None:
        """Return a view of the first tokens of a row's tail, None where there is none."""
        tails = self._tails[layer] if self._tails else None
        if tails is None or num_tokens == 0:
            return None
        return LayerKV(*(array[index : index + 1, :, :num_tokens] for array in tails))

    def release(self) -> None:
        """Note that a row has left; an empty group holds nothing."""
        self._num_members -= 1
        if not self._num_members:
            self._tails, self.layers, self.rows = [], [], []
            self.states = StateBatch({}, [])

    def _next_step(self) -> Step:
        starts = [row.num_tokens for row in self.rows]
        own_starts = [start - row.num_tail for start, row in zip(starts, self.rows, strict=True)]
        return Step(starts, own_starts, [1] * len(starts), TAIL_TOKENS)

    def _seal_full_tails(self) -> None:
        """Make room in full tails; others give their first page along, so that it is seldom."""
        if all(row.num_tail < TAIL_TOKENS for row in self.rows):
            return
        due = [index for index, row in enumerate(self.rows) if row.num_tail >= PAGE_TOKENS]
        at = mx.array(due)
        tails = [tail for tail in self._tails if tail is not None]
        pages = self._pool.write(
            len(due), lambda layer: LayerKV(*(a[at, :, :PAGE_TOKENS] for a in tails[layer]))
        )
        for index, page in zip(due, pages, strict=True):
            self.rows[index].pages.append(page)
            self.rows[index].num_tail -= PAGE_TOKENS
        is_due = mx.array([index in set(due) for index in range(len(self.rows))])
        is_due = is_due[:, None, None, None]
        self._tails = [LayerKV(*(_shifted(array, is_due) for array in kv)) for kv in tails]


def _zeros(new: mx.array) -> mx.array:
    """Return an empty tail for rows whose new token is *new*, (rows, heads, 1, D)."""
    return mx.zeros((*new.shape[:2], TAIL_TOKENS, new.shape[3]), new.dtype)


def _shifted(tail: mx.array, is_due: mx.array) -> mx.array:
    """Move the second page of those that are due to the front."""
    swapped = mx.concatenate([tail[:, :, PAGE_TOKENS:], tail[:, :, :PAGE_TOKENS]], axis=2)
    return mx.where(is_due, swapped, tail)


def _take_in(
    rows: Seq[Row], loose: Seq[Seq[KVSegment]], pool: PagePool, num_layers: int
) -> list[LayerKV | None]:
    """Copy *loose* tokens to pages and tails, tails to tails; return the layers' tails."""
    num_pages = [_num_pages(sum(each.num_tokens for each in segments)) for segments in loose]
    joined = [
        [join_tokens([each.layers[layer] for each in some]) if some else None for some in loose]
        for layer in range(num_layers)
    ]
    if any(num_pages):
        pages = iter(pool.write(sum(num_pages), lambda layer: _as_pages(joined[layer], num_pages)))
        for row, num in zip(rows, num_pages, strict=True):
            row.pages += [next(pages) for _ in range(num)]
    tails = [_tails(rows, of_layer, layer) for layer, of_layer in enumerate(joined)]
    for row, segments in zip(rows, loose, strict=True):
        row.num_tail += sum(each.num_tokens for each in segments) - (
            row.num_paged if segments else 0
        )
    return tails


def _num_pages(num_tokens: int) -> int:
    """Return how many full pages to make of tokens that join: more than one stays in the tail."""
    return max(0, num_tokens // PAGE_TOKENS - 1) if num_tokens >= TAIL_TOKENS else 0


def _as_pages(joined: Seq[LayerKV | None], num_pages: Seq[int]) -> LayerKV:
    """Cut the first pages of each into (pages, heads, PAGE_TOKENS, D)."""
    cut = [
        [_cut(a, num) for a in kv] for kv, num in zip(joined, num_pages, strict=True) if kv and num
    ]
    return LayerKV(*(mx.concatenate(list(part)) for part in zip(*cut, strict=True)))


def _cut(array: mx.array, num_pages: int) -> mx.array:
    _, heads, _, dim = array.shape
    first = array.squeeze(0)[:, : num_pages * PAGE_TOKENS].reshape(
        heads, num_pages, PAGE_TOKENS, dim
    )
    return first.swapaxes(0, 1)


def _tails(rows: Seq[Row], joined: Seq[LayerKV | None], layer: int) -> LayerKV | None:
    """Return a layer's tails of *rows*: of what joins, or of the group that a row comes from."""
    pieces = [
        row.tail(layer, TAIL_TOKENS)
        if kv is None
        else LayerKV(*(_tail_of(a, row.num_paged) for a in kv))
        for row, kv in zip(rows, joined, strict=True)
    ]
    like = next((piece for piece in pieces if piece is not None), None)
    if like is None:
        return None
    empty = LayerKV(*(mx.zeros_like(array) for array in like))
    whole = [empty if piece is None else piece for piece in pieces]
    return LayerKV(*(mx.concatenate(list(part)) for part in zip(*whole, strict=True)))


def _tail_of(array: mx.array, num_paged: int) -> mx.array:
    """Return the tokens behind the pages, padded to a tail."""
    tail = array[:, :, num_paged:]
    return mx.pad(tail, [(0, 0), (0, 0), (0, TAIL_TOKENS - tail.shape[2]), (0, 0)])
