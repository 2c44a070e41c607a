"""PageTable: which pages of which slabs are taken. Pure bookkeeping; the pool holds the arrays."""

from collections.abc import Iterable
from typing import Final, NamedTuple

from .shapes import bucket

PAGE_TOKENS: Final = 32
"""Tokens of a page: what a row is padded by, against the cost of a small product for each."""
MAX_SLABS: Final = 4
"""Each slab costs a pass of its own in every layer."""
MIN_SLAB_PAGES: Final = 4
_GROWTH: Final = 8
"""A new slab has an eighth of the pages in use."""
MAX_FREE_SHARE: Final = 0.25
"""Of the pages in use, no more are kept free."""


class Page:
    """Where a page is. The table moves it when it puts slabs together."""

    __slots__ = ("index", "slab")

    def __init__(self, slab: "Slab", index: int) -> None:
        self.slab = slab
        self.index = index


class Slab:
    """Adjacent pages, in one array for each layer's keys and one for its values."""

    def __init__(self, num_pages: int) -> None:
        self.pages: list[Page | None] = [None] * num_pages
        self.num_used = 0

    @property
    def num_free(self) -> int:
        """Pages that can be taken."""
        return len(self.pages) - self.num_used

    def take(self, num_pages: int) -> list[Page]:
        """Take as many of *num_pages* as are free."""
        free = [index for index, page in enumerate(self.pages) if page is None][:num_pages]
        taken = [Page(self, index) for index in free]
        for page in taken:
            self.pages[page.index] = page
        self.num_used += len(taken)
        return taken

    def release(self, page: Page) -> None:
        """Give a page back."""
        self.pages[page.index] = None
        self.num_used -= 1


class Move(NamedTuple):
    """The used pages of *sources* lie in *target* now, in this order, from index 0."""

    sources: list[Slab]
    indices: list[list[int]]
    """Of each source, the pages that moved."""
    target: Slab


class PageTable:
    """Slabs of pages.

    Of *used* pages at most max(MIN_SLAB_PAGES, used / 4) more are held than used, after tidy().
    Taking pages moves none; tidy() copies a slab only when it gives much back or lessens passes.
    """

    def __init__(self) -> None:
        self.slabs: list[Slab] = []
        self.version = 0
        """Counts up when pages move."""

    @property
    def num_used(self) -> int:
        """Pages in use."""
        return sum(slab.num_used for slab in self.slabs)

    @property
    def num_free(self) -> int:
        """Pages held that nobody uses."""
        return sum(slab.num_free for slab in self.slabs)

    def take(self, num_pages: int) -> list[Page]:
        """Take pages, from the fullest slabs first; add a slab for those that are missing."""
        taken: list[Page] = []
        for slab in sorted(self.slabs, key=lambda slab: slab.num_free):
            taken += slab.take(num_pages - len(taken))
        num_missing = num_pages - len(taken)
        if num_missing:
            size = max(num_missing, MIN_SLAB_PAGES, self.num_used // _GROWTH)
            self.slabs.append(Slab(bucket(size)))
            taken += self.slabs[-1].take(num_missing)
        return taken

    def give_back(self, pages: Iterable[Page]) -> None:
        """Free *pages*; slabs that nobody uses are dropped."""
        for page in pages:
            page.slab.release(page)
        self.slabs = [slab for slab in self.slabs if slab.num_used]

    def tidy(self) -> list[Move]:
        """Bound the free pages and the number of slabs; return the moves, to be made in order."""
        moves = []
        while self.num_free > max(MIN_SLAB_PAGES, int(MAX_FREE_SHARE * self.num_used)):
            emptiest = max(self.slabs, key=lambda slab: slab.num_free / len(slab.pages))
            moves.append(self._merge([emptiest]))
        while len(self.slabs) > MAX_SLABS:
            moves.append(self._merge(sorted(self.slabs, key=lambda slab: slab.num_used)[:2]))
        return moves

    def _merge(self, sources: list[Slab]) -> Move:
        """Move the used pages of *sources* into one slab that has few free ones."""
        used = [[page for page in source.pages if page is not None] for source in sources]
        target = Slab(bucket(sum(map(len, used))))
        move = Move(sources, [[page.index for page in pages] for pages in used], target)
        for index, page in enumerate(page for pages in used for page in pages):
            page.slab, page.index = target, index
            target.pages[index] = page
        target.num_used = sum(map(len, used))
        self.slabs = [slab for slab in self.slabs if slab not in sources] + [target]
        self.version += 1
        return move
