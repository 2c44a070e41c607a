"""PageViews: what the rows of a group see of their pages."""

from collections.abc import Sequence as Seq
from typing import NamedTuple

import mlx.core as mx

from .batch import Step
from .page_index import LayerPages, PageIndex
from .pages import PAGE_TOKENS, Slab
from .pool import PagePool
from .row import Row
from .windows import first_seen


class _Seen(NamedTuple):
    key: object
    """Whatever an index depends on."""
    indices: dict[Slab, PageIndex]


class _SlabView(NamedTuple):
    slab: Slab
    entries: PageIndex
    mask: mx.array | None


class PageViews:
    """Pages out of a window's sight are left out; indices are kept from step to step."""

    def __init__(self, pool: PagePool, rows: Seq[Row]) -> None:
        self._pool = pool
        self._rows = rows
        self._seen: dict[int | None, _Seen] = {}
        self._of_step: dict[int | None, list[_SlabView]] = {}

    def begin(self) -> None:
        """Forget what holds for one step only."""
        self._of_step.clear()

    def layer(self, layer: int, window: int | None, step: Step) -> list[LayerPages]:
        """Return a layer of the pages that the queries of *step*, one a row, see."""
        if window not in self._of_step:
            self._of_step[window] = [
                _SlabView(
                    slab,
                    index,
                    index.mask(step.query_positions, window),
                )
                for slab, index in self._index(window, step).items()
            ]
        return [
            LayerPages(self._pool.layer(view.slab, layer), *view[1:])
            for view in self._of_step[window]
        ]

    def _index(self, window: int | None, step: Step) -> dict[Slab, PageIndex]:
        firsts = [row.num_shared for row in self._rows]
        skipped = [
            max(0, first_seen(position, window) - first) // PAGE_TOKENS
            for position, first in zip(step.starts, firsts, strict=True)
        ]
        key = (self._pool.version, skipped, [len(row.pages) for row in self._rows])
        seen = self._seen.get(window)
        if seen is None or seen.key != key:
            pages = [row.pages[num:] for row, num in zip(self._rows, skipped, strict=True)]
            positions = [
                first + PAGE_TOKENS * num for first, num in zip(firsts, skipped, strict=True)
            ]
            self._seen[window] = seen = _Seen(key, self._pool.index(pages, positions))
        return seen.indices
