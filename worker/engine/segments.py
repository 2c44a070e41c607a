"""KVSegment: keys and values of a token range, as the prefix cache holds them of plain caches.

A model's caches (mlx-lm's objects, one a layer) are read and written here; nobody else looks
inside them, but for the runner that batches them.
"""

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any, NamedTuple

import mlx.core as mx
from mlx_lm.models.cache import CacheList, KVCache

from .runner import CacheKind


class LayerKV(NamedTuple):
    """Keys and values of one layer, each (1, heads, tokens, head dimension)."""

    keys: mx.array
    values: mx.array


@dataclass(frozen=True, slots=True, eq=False)
class KVSegment:
    """Keys and values of adjacent tokens, layer by layer, in memory of their own."""

    layers: tuple[LayerKV, ...]

    @property
    def num_tokens(self) -> int:
        """Length of the token range."""
        return int(self.layers[0].keys.shape[2])

    @property
    def nbytes(self) -> int:
        """Bytes held: the arrays are whole buffers, so this is all of it."""
        return sum(keys.nbytes + values.nbytes for keys, values in self.layers)

    @property
    def arrays(self) -> list[mx.array]:
        """Every array held, to be evaluated by whoever wants the copy made now."""
        return [array for layer in self.layers for array in layer]

    @property
    def is_resumable(self) -> bool:
        """True: a row can go on after any token."""
        return True

    def split(self, position: int) -> tuple["KVSegment", "KVSegment"]:
        """Cut at *position*; both halves own their memory. ValueError outside the range."""
        if not 0 < position < self.num_tokens:
            raise ValueError(f"can't split {self.num_tokens} tokens at {position}")
        return self._copy(0, position), self._copy(position, self.num_tokens)

    def resumable_as(self, other: "KVSegment") -> "KVSegment":  # noqa: ARG002 - needs nothing of it
        """Return this segment: it lacks nothing."""
        return self

    def _copy(self, start: int, end: int) -> "KVSegment":
        return KVSegment(
            tuple(
                LayerKV(copy_tokens(keys, start, end), copy_tokens(values, start, end))
                for keys, values in self.layers
            )
        )


def classify(caches: Seq[Any]) -> CacheKind:
    """Say what a prefix cache may store of a model with such *caches*.

    Plain keys and values in every layer can be cut anywhere; a subclass may bend the rules,
    so only mlx-lm's own class counts.
    """
    is_plain = all(type(leaf) is KVCache for leaf in flatten(caches))
    return CacheKind.SEGMENTS if is_plain else CacheKind.SNAPSHOTS


def flatten(caches: Seq[Any]) -> Iterator[Any]:
    """Yield the caches with those inside of a CacheList in its place."""
    for cache in caches:
        if isinstance(cache, CacheList):
            yield from flatten(cache.caches)
        else:
            yield cache


def state_arrays(caches: Seq[Any]) -> list[mx.array]:
    """Return every array that *caches* hold."""
    return [array for leaf in flatten(caches) for array in nested_arrays(leaf.state)]


def extract_kv(caches: Seq[Any], start: int, end: int, row: int = 0, first: int = 0) -> KVSegment:
    """Copy tokens [start, end) of *row* out of plain caches, single or batched.

    *first* is the position in the buffers of the row's first token (its left padding).
    """
    first_token, last_token = first + start, first + end
    return KVSegment(
        tuple(
            LayerKV(
                copy_tokens(leaf.keys[row : row + 1], first_token, last_token),
                copy_tokens(leaf.values[row : row + 1], first_token, last_token),
            )
            for leaf in flatten(caches)
        )
    )


def restore_kv(caches: Seq[Any], prefix: Seq[KVSegment]) -> None:
    """Fill empty plain *caches* with adjacent segments from token 0."""
    for index, leaf in enumerate(flatten(caches)):
        keys = [segment.layers[index].keys for segment in prefix]
        values = [segment.layers[index].values for segment in prefix]
        # The copy of a lone segment is made by the first write: MLX arrays are immutable and
        # KVCache grows by concatenation, which never writes into what it was given.
        leaf.keys = mx.concatenate(keys, axis=2) if len(keys) > 1 else mx.array(keys[0])
        leaf.values = mx.concatenate(values, axis=2) if len(values) > 1 else mx.array(values[0])
        leaf.offset = int(leaf.keys.shape[2])


def copy_tokens(array: mx.array, start: int, end: int) -> mx.array:
    """Copy tokens [start, end) of (rows, heads, tokens, dimension) into memory of their own.

    A gather, because `mx.contiguous` keeps the whole parent alive where it finds the slice
    contiguous already.
    """
    return mx.take(array, mx.arange(start, end), axis=2)


def nested_arrays(state: Any) -> Iterator[mx.array]:
    """Yield the arrays in nested lists and tuples."""
    if isinstance(state, mx.array):
        yield state
    elif isinstance(state, list | tuple):
        for value in state:
            yield from nested_arrays(value)
