"""PageIndex: which pages of a slab are whose, as indices of the products with them."""

from collections.abc import Sequence as Seq
from typing import NamedTuple

import mlx.core as mx

from ..segments import LayerKV
from .pages import PAGE_TOKENS
from .shapes import bucket


class PageProducts(NamedTuple):
    """Indices of matrices, each (entries, heads, parts), as MLX's products want them: unsigned."""

    of_query: mx.array
    """In (rows x heads x parts)."""
    of_page: mx.array
    """In (pages x heads)."""
    of_weights: mx.array
    """In (rows x width x heads x parts)."""


class PageIndex:
    """The pages of some rows in one slab: as entries, one after the other, and row by row.

    Products are computed entry by entry; a row's scores stand side by side, (rows, width), as
    wide as the row with most pages. Both are padded to few different shapes, which a device's
    graph cache holds. Pads stand for a page that is there, and nobody sees it.
    """

    def __init__(self, pages_of_rows: Seq[Seq[int]], positions: Seq[int]) -> None:
        """*positions* are those of each page's first token, row by row."""
        pages = [page for of_row in pages_of_rows for page in of_row]
        rows = [row for row, of_row in enumerate(pages_of_rows) for _ in of_row]
        num_rows, self._width = len(pages_of_rows), bucket(max(map(len, pages_of_rows)))
        num_pads = bucket(len(pages)) - len(pages)
        places = [
            row * self._width + at for row, of in enumerate(pages_of_rows) for at in range(len(of))
        ]
        entries, starts = [0] * (num_rows * self._width), [0] * (num_rows * self._width)
        for entry, place in enumerate(places):
            entries[place] = entry
            starts[place] = positions[entry]
        self._pages = mx.array(pages + pages[:1] * num_pads)
        self._rows = mx.array(rows + [0] * num_pads)
        self._places = mx.array(places + [0] * num_pads)
        self._starts = mx.array(starts).reshape(num_rows, self._width)
        taken = set(places)
        self._is_full = len(taken) == len(entries)
        is_page = mx.array([place in taken for place in range(len(entries))])
        self._is_page = is_page.reshape(num_rows, self._width)
        self.of_row = mx.array(entries)
        """(rows * width,): the entry at each place of a row."""
        self.row_of = mx.array(rows + [num_rows] * num_pads)
        """(entries,): whose an entry is; a pad's is behind the last row."""
        self._products: dict[tuple[int, int], PageProducts] = {}

    @property
    def width(self) -> int:
        """Keys of the row with most pages."""
        return self._width * PAGE_TOKENS

    def mask(self, query_positions: mx.array, window: int | None) -> mx.array | None:
        """Return which keys queries, (rows, 1), see: (rows, 1, 1, width); None where it is all."""
        if self._is_full and window is None:
            return None
        keys = self._starts[..., None] + mx.arange(PAGE_TOKENS)
        is_seen = mx.broadcast_to(self._is_page[..., None], keys.shape)
        if window is not None:
            is_seen = is_seen & (keys > query_positions[..., None] - window)
        return is_seen.reshape(keys.shape[0], 1, 1, -1)

    def products(self, num_heads: int, num_parts: int) -> PageProducts:
        """Return what is multiplied, where each of a row's heads has *num_parts* matrices."""
        key = num_heads, num_parts
        if key not in self._products:
            heads, parts = mx.arange(num_heads)[:, None], mx.arange(num_parts)
            indices = (
                (self._rows[:, None, None] * num_heads + heads) * num_parts + parts,
                self._pages[:, None, None] * num_heads + heads + 0 * parts,
                (self._places[:, None, None] * num_heads + heads) * num_parts + parts,
            )
            self._products[key] = PageProducts(*(each.astype(mx.uint32) for each in indices))
        return self._products[key]


class LayerPages(NamedTuple):
    """One layer of a slab, (pages, heads, PAGE_TOKENS, D), and whose pages to attend over."""

    layer: LayerKV
    entries: PageIndex
    mask: mx.array | None
    """(rows, 1, 1, width): what a row sees of its pages; None where it is all."""

    @property
    def width(self) -> int:
        """Keys of the row with most pages."""
        return self.entries.width
