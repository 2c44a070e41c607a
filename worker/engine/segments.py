"""KVSegment: keys and values of a token range, as the prefix cache holds them of plain caches.

A model's caches (mlx-lm's objects, one a layer) are read and written here; nobody else looks
inside them, but for the runner that batches them.
"""

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, Self, TypeAlias, TypeVar, cast

import mlx.core as mx
from mlx_lm.models.cache import CacheList, KVCache, QuantizedKVCache

from .runner import CacheKind


class LayerKV(NamedTuple):
    """Keys and values of one layer, each (1, heads, tokens, head dimension)."""

    keys: mx.array
    values: mx.array


class QuantizedLayerKV(NamedTuple):
    """The same quantized, in groups along the head dimension: each (1, heads, tokens, ...)."""

    key_codes: mx.array
    key_scales: mx.array
    key_biases: mx.array
    value_codes: mx.array
    value_scales: mx.array
    value_biases: mx.array


Layer: TypeAlias = LayerKV | QuantizedLayerKV
L = TypeVar("L", bound=Layer)


@dataclass(frozen=True, slots=True, eq=False)
class _LayeredSegment(Generic[L]):
    """Keys and values of adjacent tokens, layer by layer, in memory of their own."""

    layers: tuple[L, ...]

    @property
    def num_tokens(self) -> int:
        """Length of the token range."""
        return int(self.layers[0][0].shape[2])

    @property
    def nbytes(self) -> int:
        """Bytes held: the arrays are whole buffers, so this is all of it."""
        return sum(array.nbytes for array in self.arrays)

    @property
    def arrays(self) -> list[mx.array]:
        """Every array held, to be evaluated by whoever wants the copy made now."""
        return [array for layer in self.layers for array in layer]

    @property
    def is_resumable(self) -> bool:
        """True: a row can go on after any token."""
        return True

    def split(self, position: int) -> tuple[Self, Self]:
        """Cut at *position*; both halves own their memory. ValueError outside the range."""
        if not 0 < position < self.num_tokens:
            raise ValueError(f"can't split {self.num_tokens} tokens at {position}")
        return self._copy(0, position), self._copy(position, self.num_tokens)

    def resumable_as(self, other: Self) -> Self:  # noqa: ARG002 - needs nothing of it
        """Return this segment: it lacks nothing."""
        return self

    def _copy(self, start: int, end: int) -> Self:
        return type(self)(tuple(copy_layer(layer, start, end) for layer in self.layers))


class KVSegment(_LayeredSegment[LayerKV]):
    """Of floats, as the model computes them."""


class QuantizedKVSegment(_LayeredSegment[QuantizedLayerKV]):
    """Of quantized ones."""


def classify(caches: Seq[Any]) -> CacheKind:
    """Say what a prefix cache may store of a model with such *caches*.

    Plain keys and values in every layer can be cut anywhere; a subclass may bend the rules,
    so only mlx-lm's own classes count.
    """
    are_plain = all(is_plain(leaf) for leaf in flatten(caches))
    return CacheKind.SEGMENTS if are_plain else CacheKind.SNAPSHOTS


def is_plain(cache: Any) -> bool:
    """Whether *cache* holds every token's keys and values for good."""
    return type(cache) in (KVCache, QuantizedKVCache)


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


def extract_kv(
    caches: Seq[Any], start: int, end: int, row: int = 0, first: int = 0
) -> KVSegment | QuantizedKVSegment:
    """Copy tokens [start, end) of *row* out of plain caches, single or batched.

    *first* is the position in the buffers of the row's first token (its left padding).
    """
    layers = [extract_layer(leaf, first + start, first + end, row=row) for leaf in flatten(caches)]
    if isinstance(layers[0], QuantizedLayerKV):
        return QuantizedKVSegment(tuple(cast(list[QuantizedLayerKV], layers)))
    return KVSegment(tuple(cast(list[LayerKV], layers)))


def restore_kv(caches: Seq[Any], prefix: Seq[KVSegment | QuantizedKVSegment]) -> None:
    """Fill empty plain *caches* with adjacent segments from token 0."""
    for index, leaf in enumerate(flatten(caches)):
        fill_layer(leaf, [segment.layers[index] for segment in prefix])


def extract_layer(cache: Any, start: int, end: int, *, row: int = 0) -> Layer:
    """Copy what a plain *cache* holds at places [start, end) of its buffers."""
    if isinstance(cache, QuantizedKVCache):
        state: Any = cache.state
        arrays = (*state[0], *state[1])
        return QuantizedLayerKV(*(copy_tokens(each[row : row + 1], start, end) for each in arrays))
    keys, values = cache.keys[row : row + 1], cache.values[row : row + 1]
    return LayerKV(copy_tokens(keys, start, end), copy_tokens(values, start, end))


def fill_layer(cache: Any, pieces: Seq[Layer]) -> None:
    """Put adjacent pieces from token 0 into an empty plain *cache*."""
    # The copy of a lone piece is made by the first write: MLX arrays are immutable and these
    # caches grow by concatenation, which never writes into what it was given.
    whole = [
        mx.concatenate(list(parts), axis=2) if len(parts) > 1 else mx.array(parts[0])
        for parts in zip(*pieces, strict=True)
    ]
    half = len(whole) // 2
    if half > 1:
        cache.keys, cache.values = tuple(whole[:half]), tuple(whole[half:])
    else:
        cache.keys, cache.values = whole
    cache.offset = int(whole[0].shape[2])


def copy_layer(layer: L, start: int, end: int) -> L:
    """Copy tokens [start, end) into memory of their own."""
    copies: Any = (copy_tokens(array, start, end) for array in layer)
    return type(layer)(*copies)


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
