"""One forward over several batches of rows, in which every token is a row of its own.

Only attention knows of rows: everything else in a layer treats each token alone, so prompt chunks
of any lengths and the next tokens of decoding rows go through it in one pass, without pads, and
the weights are read once. Attention is computed batch by batch, on right-padded rows.
"""

from collections.abc import Sequence as Seq
from itertools import accumulate
from typing import Any, NamedTuple, NoReturn

import mlx.core as mx

from .batch import LayerCache


class _Pads(NamedTuple):
    """How rows of unlike lengths are padded, and taken out again."""

    sources: mx.array
    """(rows * width,) the token that stands there; a pad repeats its row's last one."""
    places: mx.array
    """(tokens,) where each token stands."""

    @classmethod
    def of(cls, num_new: Seq[int], width: int) -> "_Pads":
        sources: list[int] = []
        places: list[int] = []
        for row, count in enumerate(num_new):
            first = len(places)
            sources += [first + min(index, count - 1) for index in range(width)]
            places += [row * width + index for index in range(count)]
        return cls(mx.array(sources), mx.array(places))


class Part:
    """A batch in the forward: tokens [first, last) are its, row after row."""

    def __init__(
        self, layers: Seq[LayerCache], starts: Seq[int], num_new: Seq[int], first: int
    ) -> None:
        """Take a prepared batch's *layers*, and *num_new* tokens a row from positions *starts*."""
        self.layers = layers
        self.first = first
        self.last = first + sum(num_new)
        self.positions = [
            start + index
            for start, count in zip(starts, num_new, strict=True)
            for index in range(count)
        ]
        self.ends = [end - 1 for end in accumulate(num_new, initial=first)][1:]
        """Index of each row's last token among those of all parts."""
        self._num_rows = len(num_new)
        self._width = max(num_new)
        self.num_pads = self._width * len(num_new) - sum(num_new)
        """Tokens that attention computes for nothing."""
        self._pads = _Pads.of(num_new, self._width) if self.num_pads else None

    def padded(self, flat: mx.array) -> mx.array:
        """Turn all parts' (tokens, heads, 1, D) into this one's (rows, heads, width, D)."""
        own = flat[self.first : self.last, :, 0]
        if self._pads is not None:
            own = own[self._pads.sources]
        return own.reshape(self._num_rows, self._width, *own.shape[1:]).swapaxes(1, 2)

    def flat(self, padded: mx.array) -> mx.array:
        """Turn (rows, heads, width, D) into this part's (tokens, heads, 1, D)."""
        tokens = padded.swapaxes(1, 2).reshape(-1, padded.shape[1], 1, padded.shape[3])
        return tokens if self._pads is None else tokens[self._pads.places]


class JointMask:
    """The parts' masks. Only our attention can read them."""

    def __init__(self, masks: Seq[Any]) -> None:
        self.masks = tuple(masks)

    def __bool__(self) -> NoReturn:
        raise TypeError("the mask of shared prefixes is opaque to models")


class Buffers(tuple[mx.array, ...]):
    """The parts' keys, or values, with as much of an array's face as models look at."""

    @property
    def dtype(self) -> mx.Dtype:
        """Type of their numbers."""
        return self[0].dtype

    def astype(self, dtype: mx.Dtype) -> "Buffers":
        """Return them in another type."""
        return Buffers(array.astype(dtype) for array in self)


class Piece(NamedTuple):
    """What attention over one part is called with."""

    queries: mx.array
    """(rows, heads, width, D)"""
    keys: mx.array
    values: mx.array
    cache: Any
    mask: Any


class JointLayer:
    """One layer of all parts, as mlx-lm's models take a cache."""

    def __init__(self, parts: Seq[Part], index: int, offset: mx.array) -> None:
        self._parts = parts
        self._layers = [part.layers[index] for part in parts]
        self.offset = offset
        """Each token's position, (tokens,)."""

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Buffers, Buffers]:
        """Give the new tokens to their batches; return what is the rows' own there."""
        fetched = [
            layer.update_and_fetch(part.padded(keys), part.padded(values))
            for part, layer in zip(self._parts, self._layers, strict=True)
        ]
        return Buffers(kv[0] for kv in fetched), Buffers(kv[1] for kv in fetched)

    def make_mask(self, _num_queries: int, **options: Any) -> JointMask:
        """Return the parts' masks."""
        return JointMask([layer.make_mask(1, **options) for layer in self._layers])

    def split(
        self, queries: mx.array, keys: Buffers, values: Buffers, mask: JointMask
    ) -> list[Piece]:
        """Return what attention is called with, part by part; queries are (tokens, heads, 1, D)."""
        padded = [part.padded(queries) for part in self._parts]
        return list(map(Piece, padded, keys, values, self._layers, mask.masks))

    def join(self, outputs: Seq[mx.array]) -> mx.array:
        """Put the parts' (rows, heads, width, D) together, (tokens, heads, 1, D)."""
        flat = [part.flat(output) for part, output in zip(self._parts, outputs, strict=True)]
        return flat[0] if len(flat) == 1 else mx.concatenate(flat)


class Joint:
    """A forward over batches, which are prepared for it part by part."""

    def __init__(self) -> None:
        self._parts: list[Part] = []

    @property
    def num_pads(self) -> int:
        """Tokens that attention computes for nothing."""
        return sum(part.num_pads for part in self._parts)

    @property
    def ends(self) -> mx.array:
        """Index of each row's last token, part after part, (rows,)."""
        return mx.array([end for part in self._parts for end in part.ends])

    def add(self, layers: Seq[LayerCache], starts: Seq[int], num_new: Seq[int]) -> None:
        """Append the rows of a batch, which compute *num_new* tokens from *starts* each."""
        first = self._parts[-1].last if self._parts else 0
        self._parts.append(Part(layers, starts, num_new, first))

    def layers(self) -> list[JointLayer]:
        """Return the caches of the forward."""
        offset = mx.array([position for part in self._parts for position in part.positions])
        num_layers = len(self._parts[0].layers)
        return [JointLayer(self._parts, index, offset) for index in range(num_layers)]
