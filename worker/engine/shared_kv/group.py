"""Rows that compute together: their own keys and values, padded to one capacity."""

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import NamedTuple, NoReturn

import mlx.core as mx

from ..segments import KVSegment, LayerKV
from .layout import Span, bucket, find_spans

MAX_ABSORBED_TOKENS = 128
"""A segment up to this long that only one row uses is copied into the row: each segment costs a
pass of its own in every layer, which pays where several rows share it or where it is long."""


class Row:
    """Where a sequence's keys and values are: shared segments, then its own in a group."""

    def __init__(self, prefix: Seq[KVSegment]) -> None:
        self.prefix = tuple(prefix)
        self.lone: tuple[KVSegment, ...] = ()
        """Segments behind *prefix* that become own tokens when the row joins its next group."""
        self.num_shared = sum(segment.num_tokens for segment in prefix)
        self.num_own = 0
        self.group: Group | None = None
        self.index = 0

    @property
    def num_tokens(self) -> int:
        """Tokens computed."""
        return self.num_shared + self.num_own

    def leave(self) -> None:
        """Leave the group; the last one out drops its buffers, which it is in a cycle with."""
        if self.group is not None:
            self.group.forget_one()
            self.group = None

    def absorb(self, num_users: Mapping[int, int]) -> None:
        """Take short segments at the prefix's end that nobody else uses as own tokens.

        *num_users* counts all rows there are by the id of a segment.
        """
        keep = len(self.prefix)
        while keep and _is_lone(self.prefix[keep - 1], num_users):
            keep -= 1
        self.prefix, self.lone = self.prefix[:keep], self.prefix[keep:] + self.lone
        num_moved = self.num_shared - sum(segment.num_tokens for segment in self.prefix)
        self.num_shared -= num_moved
        self.num_own += num_moved

    def own_pieces(self, layer: int) -> list[LayerKV]:
        """Return the own tokens of a layer, in order: lone segments, then the group's."""
        num_lone = sum(segment.num_tokens for segment in self.lone)
        buffered = self.own(layer, 0, self.num_own - num_lone)
        pieces = [segment.layers[layer] for segment in self.lone]
        return pieces if buffered is None else [*pieces, buffered]

    def own(self, layer: int, start: int, end: int) -> LayerKV | None:
        """Return a view of own tokens [start, end) of a layer, None if nothing was computed."""
        kv = None if self.group is None else self.group.layers[layer].kv
        if kv is None or start == end:
            return None
        keys, values = kv
        at = slice(self.index, self.index + 1)
        return LayerKV(keys[at, :, start:end], values[at, :, start:end])


def _is_lone(segment: KVSegment, num_users: Mapping[int, int]) -> bool:
    return num_users[id(segment)] == 1 and segment.num_tokens <= MAX_ABSORBED_TOKENS


class OwnMask:
    """Which of its own keys a query may see. Only our attention can read it."""

    def __init__(self, array: mx.array) -> None:
        self.array = array

    def __bool__(self) -> NoReturn:
        raise TypeError("the mask of shared prefixes is opaque to models")


class LayerSpan(NamedTuple):
    """One layer of a shared segment, and the rows [first_row, last_row) that start with it."""

    layer: LayerKV
    first_row: int
    last_row: int


class Step(NamedTuple):
    """What all layers of a forward have in common."""

    offset: mx.array  # (rows,) position of each row's first new token
    next_offset: mx.array
    places: mx.array  # (rows, 1, queries, 1) where new keys go in the row's own buffer
    mask: OwnMask


class LayerCache:
    """One layer of a group, as mlx-lm's models take a cache."""

    def __init__(self, group: "Group", index: int, kv: LayerKV | None) -> None:
        self._group = group
        self._index = index
        self.kv = kv
        self.offset = mx.array(0)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Write the new tokens behind each row's own; return the own buffers."""
        step = self._group.step
        old = self.kv or LayerKV(
            *(
                mx.zeros((*new.shape[:2], self._group.capacity, new.shape[3]), new.dtype)
                for new in (keys, values)
            )
        )
        self.kv = LayerKV(
            mx.put_along_axis(old.keys, step.places, keys, axis=2),
            mx.put_along_axis(old.values, step.places, values, axis=2),
        )
        self.offset = step.next_offset
        return self.kv

    def make_mask(
        self,
        _num_queries: int,
        return_array: bool = False,  # noqa: ARG002  # mlx-lm's protocol names it
        window_size: int | None = None,
    ) -> OwnMask:
        """Return the step's mask; TypeError for a sliding window."""
        if window_size is not None:
            raise TypeError("a sliding window can't be used with shared prefixes")
        return self._group.step.mask

    def shared(self) -> list[list[LayerSpan]]:
        """Return this layer of the shared segments, one list for each depth of the trie."""
        return [
            [LayerSpan(span.segment.layers[self._index], *span[1:]) for span in depth]
            for depth in self._group.depths
        ]


class Group:
    """Rows in depth-first order, with buffers (rows, heads, capacity, D) for each layer."""

    step: Step

    def __init__(self, rows: Seq[Row], num_layers: int) -> None:
        self.rows: list[Row] = list(rows)
        self.capacity = bucket(max(1, *(row.num_own for row in rows)))
        self.depths = _by_depth(find_spans([row.prefix for row in rows]))
        self.layers = [
            LayerCache(self, layer, _join(rows, layer, self.capacity))
            for layer in range(num_layers)
        ]
        self.num_members = len(rows)
        for index, row in enumerate(rows):
            row.leave()
            row.group, row.index, row.lone = self, index, ()

    @property
    def arrays(self) -> list[mx.array]:
        """Everything held."""
        return [array for layer in self.layers if layer.kv is not None for array in layer.kv]

    def adopt(self, layers: Seq[LayerKV | None]) -> None:
        """Copy own keys and values that come from another place, layer by layer."""
        self.layers = [
            LayerCache(
                self, index, kv and LayerKV(*(pad_tokens(array, self.capacity) for array in kv))
            )
            for index, kv in enumerate(layers)
        ]

    def forget_one(self) -> None:
        """Note that a row has left; an empty group holds nothing."""
        self.num_members -= 1
        if not self.num_members:
            self.layers, self.rows = [], []

    def is_exactly(self, rows: Seq[Row]) -> bool:
        """Say whether the group holds *rows* and no others, whatever their order."""
        return len(rows) == len(self.rows) and all(row.group is self for row in rows)

    def begin(self, num_new: Seq[int]) -> None:
        """Prepare a forward of *num_new* tokens a row, right-padded to the longest."""
        width = max(num_new)
        self._grow(max(row.num_own for row in self.rows) + width)
        own = mx.array([row.num_own for row in self.rows])
        offset = mx.array([row.num_tokens for row in self.rows])
        # Pads land behind the row's last token: masked until a real token is written there.
        places = own[:, None] + mx.arange(width)
        visible = mx.arange(self.capacity) <= places[:, :, None]
        self.step = Step(
            offset,
            offset + mx.array(list(num_new)),
            places[:, None, :, None],
            OwnMask(visible[:, None, None]),
        )
        for layer in self.layers:
            layer.offset = offset
        for row, count in zip(self.rows, num_new, strict=True):
            row.num_own += count

    def _grow(self, num_tokens: int) -> None:
        if num_tokens <= self.capacity:
            return
        self.capacity = bucket(num_tokens)
        for layer in self.layers:
            if layer.kv is not None:
                layer.kv = LayerKV(*(pad_tokens(array, self.capacity) for array in layer.kv))


def pad_tokens(array: mx.array, capacity: int) -> mx.array:
    """Append zeros to (rows, heads, tokens, D) up to *capacity* tokens."""
    return mx.pad(array, [(0, 0), (0, 0), (0, capacity - array.shape[2]), (0, 0)])


def _join(rows: Seq[Row], layer: int, capacity: int) -> LayerKV | None:
    """Copy the rows' own keys and values of a layer into one buffer."""
    pieces = [row.own_pieces(layer) for row in rows]
    like = next((of_row[0] for of_row in pieces if of_row), None)
    if like is None:
        return None
    return LayerKV(
        *(
            mx.concatenate([_padded(of_row, part, example, capacity) for of_row in pieces])
            for part, example in enumerate(like)
        )
    )


def _padded(pieces: list[LayerKV], part: int, like: mx.array, capacity: int) -> mx.array:
    """Return one row's keys (part 0) or values (part 1), (1, heads, capacity, D)."""
    if not pieces:
        return mx.zeros((1, like.shape[1], capacity, like.shape[3]), like.dtype)
    arrays = [piece[part] for piece in pieces]
    whole = arrays[0] if len(arrays) == 1 else mx.concatenate(arrays, axis=2)
    return pad_tokens(whole, capacity)


def _by_depth(spans: Seq[Span]) -> list[list[Span]]:
    """Put spans of one depth, which cover different rows, into one list."""
    depths: list[list[Span]] = []
    for span in spans:
        if not depths or span.first_row < depths[-1][-1].last_row:
            depths.append([])
        depths[-1].append(span)
    return depths
