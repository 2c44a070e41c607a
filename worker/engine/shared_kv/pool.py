"""PagePool: the keys and values of full pages, which are written once and never again."""

from collections.abc import Callable
from collections.abc import Sequence as Seq

import mlx.core as mx

from ..segments import LayerKV
from .page_index import PageIndex
from .pages import PAGE_TOKENS, Page, PageTable, Slab


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
