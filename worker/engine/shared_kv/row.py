"""Row: where the keys and values of one sequence are."""

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import Final, Protocol

import mlx.core as mx

from ..segments import KVSegment, LayerKV, copy_tokens
from .pages import PAGE_TOKENS, Page
from .pool import PagePool
from .recurrent import RowStates, StateBatch

MAX_ABSORBED_TOKENS: Final = 128
"""A segment up to this long that only one row uses is copied into the row: each segment costs a
pass of its own in every layer, which pays where several rows share it or where it is long."""
MAX_ABSORBED_IN_ALL: Final = 512
"""Of such segments a row copies this many tokens at most: the prefix cache holds them, too."""


class TailHolder(Protocol):
    """Who holds the tails of rows that decode together."""

    is_stale: bool
    """Set when a row's prefix is another one now."""
    states: StateBatch

    @property
    def arrays(self) -> list[mx.array]:
        """The tails."""
        ...

    @property
    def num_held_tokens(self) -> int:
        """Tokens that fit into the tails, also of rows that have left."""
        ...

    def tail(self, layer: int, index: int, num_tokens: int) -> LayerKV | None:
        """Return a view of the first tokens of a row's tail, None where there is none."""
        ...

    def release(self) -> None:
        """Note that a row has left."""
        ...


class Row:
    """A sequence's tokens, in order.

    [0, num_shared)        segments of the prefix cache: *prefix*
    then *private*         segments of the row's own, which prefills make; gone when it decodes
    then *pages*           full pages in the pool
    then *num_tail*        the newest tokens, in the group that the row decodes in
    """

    def __init__(
        self, pool: PagePool, num_layers: int, prefix: Seq[KVSegment], states: RowStates
    ) -> None:
        """*num_layers* have keys and values; *states* are what recurrent ones hold behind *prefix*,
        which the row never changes.
        """
        self._pool = pool
        self._num_layers = num_layers
        self.prefix = tuple(prefix)
        self.private: list[KVSegment] = []
        self.pages: list[Page] = []
        self.num_tail = 0
        self.group: TailHolder | None = None
        self.index = 0
        self._states = states
        self._owns_states = False

    @property
    def states(self) -> RowStates:
        """What recurrent layers hold."""
        return self._states if self.group is None else self.group.states.row(self.index)

    @property
    def arrays(self) -> list[mx.array]:
        """What the row itself holds, outside of pages and groups."""
        states = self._states.values() if self._owns_states else ()
        return [array for segment in self.private for array in segment.arrays] + [
            array for arrays in states for array in arrays if array is not None
        ]

    @property
    def num_shared(self) -> int:
        """Tokens in segments of the prefix cache."""
        return sum(segment.num_tokens for segment in self.prefix)

    @property
    def num_own(self) -> int:
        """Tokens that the row holds itself."""
        return sum(segment.num_tokens for segment in self.private) + self.num_paged + self.num_tail

    @property
    def num_paged(self) -> int:
        """Tokens in pages."""
        return PAGE_TOKENS * len(self.pages)

    @property
    def num_tokens(self) -> int:
        """Tokens computed."""
        return self.num_shared + self.num_own

    @property
    def has_decoded(self) -> bool:
        """Whether tokens are in pages or in a tail."""
        return bool(self.pages) or self.num_tail > 0

    def leave(self) -> None:
        """Leave the group, and give all pages back."""
        self._pool.give_back(self.pages)
        self.pages, self.num_tail = [], 0
        self.move(None, 0)

    def move(self, group: TailHolder | None, index: int) -> None:
        """Belong to *group* from now on, at *index*."""
        if self.group is not None:
            self.set_states(self.states if group is None else {})
            self.group.release()
        self.group, self.index = group, index

    def set_states(self, states: RowStates) -> None:
        """Take what recurrent layers hold now, in memory of the row's own."""
        self._states, self._owns_states = states, True

    def append(self, segment: KVSegment) -> None:
        """Add computed tokens; lengths of private segments stay geometric, so that few suffice."""
        self.private.append(segment)
        while len(self.private) > 1 and _is_due(*self.private[-2:]):
            last, other = self.private.pop(), self.private.pop()
            self.private.append(merged([other, last]))

    def drop_own(self, num_tokens: int) -> None:
        """Forget the first own tokens."""
        if self.has_decoded and num_tokens < self.num_own:
            rest = [self._copy([], num_tokens, self.num_own)]
        else:
            rest = _without(self.private, num_tokens)
        self.leave()
        self.private = rest

    def set_prefix(self, prefix: Seq[KVSegment]) -> None:
        """Refer to other segments, as long as the old ones and what was dropped of the own."""
        self.prefix = tuple(prefix)
        if self.group is not None:
            self.group.is_stale = True

    def solidify(self) -> None:
        """Turn pages and tail into a private segment, as a prefill goes on behind them."""
        if self.group is not None:
            self.drop_own(0)

    def absorb(self, num_users: Mapping[int, int]) -> list[KVSegment]:
        """Give up private segments, which the caller copies, and short ones of nobody else's.

        *num_users* counts all rows there are by the id of a segment. A row that has decoded
        keeps its prefix: pages are not put before others.
        """
        keep, num_tokens = len(self.prefix), 0
        while keep and not self.has_decoded and _is_lone(self.prefix[keep - 1], num_users):
            num_tokens += self.prefix[keep - 1].num_tokens
            if num_tokens > MAX_ABSORBED_IN_ALL:
                break
            keep -= 1
        loose = [*self.prefix[keep:], *self.private]
        self.prefix, self.private = self.prefix[:keep], []
        return loose

    def copy(self, start: int, end: int) -> KVSegment:
        """Copy tokens [start, end), shared or own."""
        return self._copy(list(self.prefix), start, end)

    def _copy(self, before: Seq[KVSegment], start: int, end: int) -> KVSegment:
        segments = [*before, *self.private]
        return KVSegment(
            tuple(
                _cut([*(each.layers[layer] for each in segments), *self._own(layer)], start, end)
                for layer in range(self._num_layers)
            )
        )

    def _own(self, layer: int) -> list[LayerKV]:
        """Return what a layer has behind the segments."""
        paged = [self._pool.read(self.pages, layer)] if self.pages else []
        tail = self.tail(layer, self.num_tail)
        return paged if tail is None else [*paged, tail]

    def tail(self, layer: int, num_tokens: int) -> LayerKV | None:
        """Return a view of the first tokens of the tail, None where there is none."""
        return None if self.group is None else self.group.tail(layer, self.index, num_tokens)


def _is_due(older: KVSegment, newer: KVSegment) -> bool:
    return older.num_tokens <= newer.num_tokens


def _is_lone(segment: KVSegment, num_users: Mapping[int, int]) -> bool:
    return num_users[id(segment)] == 1 and segment.num_tokens <= MAX_ABSORBED_TOKENS


def merged(segments: Seq[KVSegment]) -> KVSegment:
    """Copy adjacent segments into one."""
    layers = zip(*(segment.layers for segment in segments), strict=True)
    return KVSegment(tuple(join_tokens(list(layer)) for layer in layers))


def join_tokens(pieces: Seq[LayerKV]) -> LayerKV:
    """Put adjacent tokens, (1, heads, tokens, D), together."""
    if len(pieces) == 1:
        return pieces[0]
    return LayerKV(*(mx.concatenate(list(part), axis=2) for part in zip(*pieces, strict=True)))


def _cut(pieces: Seq[LayerKV], start: int, end: int) -> LayerKV:
    """Copy tokens [start, end) of adjacent pieces into memory of their own."""
    copies, first = [], 0
    for kv in pieces:
        num_tokens = kv.keys.shape[2]
        low, high = max(0, start - first), min(num_tokens, end - first)
        if low < high:
            copies.append(LayerKV(*(copy_tokens(array, low, high) for array in kv)))
        first += num_tokens
    return join_tokens(copies)


def _without(segments: Seq[KVSegment], num_tokens: int) -> list[KVSegment]:
    """Return what of *segments* is behind the first *num_tokens*."""
    rest: list[KVSegment] = []
    for segment in segments:
        if num_tokens >= segment.num_tokens:
            num_tokens -= segment.num_tokens
            continue
        rest.append(segment.split(num_tokens)[1] if num_tokens else segment)
        num_tokens = 0
    return rest
