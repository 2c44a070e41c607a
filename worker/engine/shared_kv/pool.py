"""PagePool: the keys and values of full pages, which are written once and never again."""

from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import NamedTuple

import mlx.core as mx

from ..segments import LayerKV
from .pages import PAGE_TOKENS, Page, PageTable, Slab
from .shapes import bucket


class PageIndex:
    """The pages of some rows in one slab, and which of them are whose.

    Padded to few different shapes, which a device's graph cache holds; pads weigh nothing.
    """

    def __init__(self, pages_of_rows: Seq[Seq[int]], positions: Seq[int] = ()) -> None:
        """*positions* are those of each page's first token, row by row."""
        pages = [page for of_row in pages_of_rows for page in of_row]
        rows = [row for row, of_row in enumerate(pages_of_rows) for _ in of_row]
        num_pads = bucket(len(pages) + 1) - len(pages)
        width = bucket(max(map(len, pages_of_rows)))
        self._pages = mx.array(pages + [pages[0]] * num_pads)
        self._rows = mx.array(rows + [0] * num_pads)
        self._positions = mx.array([*positions, *[0] * (len(rows) + num_pads - len(positions))])
        self.is_page = (mx.arange(len(pages) + num_pads) < len(pages))[:, None, None, None]
        """(entries, 1, 1, 1): False for pads, of which there is one at least, the last."""
        self.of_row = mx.array(_entries(pages_of_rows, width, pad=len(pages)))
        """(rows, pages of the longest): each row's entries, then pads."""
        self._by_heads: dict[int, tuple[mx.array, mx.array]] = {}

    @property
    def pages(self) -> mx.array:
        """(entries,): pages of the slab."""
        return self._pages

    @property
    def rows(self) -> mx.array:
        """(entries,): the row of each."""
        return self._rows

    def mask(self, query_positions: mx.array, window: int) -> mx.array:
        """Return which keys the rows' queries, (rows, 1), see: (entries, 1, 1, PAGE_TOKENS)."""
        keys = self._positions[:, None] + mx.arange(PAGE_TOKENS)
        return (keys > query_positions[self._rows] - window)[:, None, None]

    def matrices(self, num_heads: int) -> tuple[mx.array, mx.array]:
        """Return each entry's matrices in (rows x heads) and in (pages x heads)."""
        if num_heads not in self._by_heads:
            heads = mx.arange(num_heads)
            self._by_heads[num_heads] = (
                self._rows[:, None] * num_heads + heads,
                self._pages[:, None] * num_heads + heads,
            )
        return self._by_heads[num_heads]


class LayerPages(NamedTuple):
    """One layer of a slab, (pages, heads, PAGE_TOKENS, D), and whose pages to attend over."""

    layer: LayerKV
    entries: PageIndex
    mask: mx.array | None
    """(entries, 1, 1, PAGE_TOKENS): what a row sees of its page; None: all."""


class PagePool:
    """One slab list for all layers: a page has the same place in each."""

    def __init__(self, num_layers: int) -> None:
        self._num_layers = num_layers
        self._table = PageTable()
        self._layers: dict[Slab, list[LayerKV]] = {}
        self.num_moved_pages = 0
        """Copied so far because slabs were put together."""

    @property
    def arrays(self) -> list[mx.array]:
        """Everything held."""
        return [array for layers in self._layers.values() for kv in layers for array in kv]

    @property
    def version(self) -> int:
        """Counts up when pages move."""
        return self._table.version

    @property
    def num_held_tokens(self) -> int:
        """Tokens that fit into the pages, free ones included."""
        return PAGE_TOKENS * (self._table.num_used + self._table.num_free)

    def give_back(self, pages: Seq[Page]) -> None:
        """Free *pages*."""
        self._table.give_back(pages)
        held = set(self._table.slabs)
        self._layers = {slab: layers for slab, layers in self._layers.items() if slab in held}

    def write(self, num_pages: int, content: Callable[[int], LayerKV]) -> list[Page]:
        """Write new pages; *content* gives a layer's, (num_pages, heads, PAGE_TOKENS, D)."""
        self.tidy()
        pages = self._table.take(num_pages)
        slabs = list(dict.fromkeys(page.slab for page in pages))
        # What is launched reads the slabs, and MLX writes in place only where nobody does: to
        # wait here, once in many steps, is dearer by far than nothing and cheaper than a copy.
        if any(slab in self._layers for slab in slabs):
            mx.synchronize()
        places = {slab: [i for i, page in enumerate(pages) if page.slab is slab] for slab in slabs}
        for layer in range(self._num_layers):
            new = content(layer)
            for slab, chosen in places.items():
                targets = mx.array([pages[index].index for index in chosen])
                whole = len(chosen) == len(pages)
                part = new if whole else LayerKV(*(array[mx.array(chosen)] for array in new))
                self._write_layer(slab, layer, targets, part)
        return pages

    def _write_layer(self, slab: Slab, layer: int, targets: mx.array, new: LayerKV) -> None:
        layers = self._layers.setdefault(slab, [])
        if layer == len(layers):
            shapes = [(len(slab.pages), *array.shape[1:]) for array in new]
            layers.append(
                LayerKV(mx.zeros(shapes[0], new[0].dtype), mx.zeros(shapes[1], new[1].dtype))
            )
        for array, values in zip(layers[layer], new, strict=True):
            array[targets] = values

    def read(self, pages: Seq[Page], layer: int) -> LayerKV:
        """Copy *pages* of a layer to adjacent tokens, (1, heads, tokens, D)."""
        pieces = []
        for page in pages:
            kv = self._layers[page.slab][layer]
            pieces.append([array[page.index : page.index + 1] for array in kv])
        return LayerKV(*(mx.concatenate(list(part), axis=2) for part in zip(*pieces, strict=True)))

    def index(
        self, pages_of_rows: Seq[Seq[Page]], first_positions: Seq[int]
    ) -> dict[Slab, PageIndex]:
        """Return where the rows' pages are, slab by slab; good until `version` changes.

        *first_positions* are those of each row's first page.
        """
        placed = [
            [(page, first + PAGE_TOKENS * at) for at, page in enumerate(pages)]
            for pages, first in zip(pages_of_rows, first_positions, strict=True)
        ]
        indices = {}
        for slab in self._table.slabs:
            of_slab = [[each for each in pages if each[0].slab is slab] for pages in placed]
            if any(of_slab):
                of_rows = [[page.index for page, _ in pages] for pages in of_slab]
                positions = [position for pages in of_slab for _, position in pages]
                indices[slab] = PageIndex(of_rows, positions)
        return indices

    def layer(self, slab: Slab, layer: int) -> LayerKV:
        """Return a layer of a slab, (pages, heads, PAGE_TOKENS, D)."""
        return self._layers[slab][layer]

    def tidy(self) -> None:
        """Bound what is free."""
        for sources, indices, target in self._table.tidy():
            self.num_moved_pages += target.num_used
            old = [self._layers.pop(source) for source in sources]
            # Any page will do where one is free.
            indices[-1].extend([0] * target.num_free)
            chosen = [mx.array(each) for each in indices]
            self._layers[target] = [
                LayerKV(
                    *(
                        mx.concatenate(
                            [kv[layer][part][at] for kv, at in zip(old, chosen, strict=True)]
                        )
                        for part in range(2)
                    )
                )
                for layer in range(self._num_layers)
            ]


def _entries(pages_of_rows: Seq[Seq[int]], width: int, pad: int) -> list[list[int]]:
    first, entries = 0, []
    for pages in pages_of_rows:
        entries.append(list(range(first, first + len(pages))) + [pad] * (width - len(pages)))
        first += len(pages)
    return entries
