"""StateSegment: what is kept of rows with caches that can't be cut: windows, recurrent states."""

import copy
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from typing import Any, cast

import mlx.core as mx
from mlx.utils import tree_map
from mlx_lm.models.cache import RotatingKVCache

from .segments import (
    KVSegment,
    Layer,
    LayerKV,
    copy_layer,
    extract_layer,
    fill_layer,
    flatten,
    is_plain,
    nested_arrays,
)


@dataclass(frozen=True, slots=True, eq=False)
class StateSegment:
    """Tokens of a row: plain keys and values of just these, and all other state at their end.

    So adjacent segments share what plain layers hold, and each one more costs a state. Layers
    are named by their place among the model's caches, lists of caches flattened.
    """

    num_tokens: int
    plain: Mapping[int, Layer]
    """Keys and values of the segment's tokens, by layer."""
    states: Mapping[int, Any] | None
    """The other layers' caches, copied, by layer; None where a cut fell."""
    shared: KVSegment | None = None
    """*plain* as one object, made here if not given, which is the same one whatever state is
    added: rows that refer to it know by that that they share it. None of quantized layers."""

    def __post_init__(self) -> None:
        layers = tuple(self.plain.values())
        if self.shared is None and all(isinstance(layer, LayerKV) for layer in layers):
            object.__setattr__(self, "shared", KVSegment(cast(tuple[LayerKV, ...], layers)))

    @classmethod
    def capture(cls, caches: Seq[Any], start: int, end: int) -> "StateSegment":
        """Copy tokens [start, end) of a row that stands at *end*; it may go on at once."""
        plain: dict[int, Layer] = {}
        states: dict[int, Any] = {}
        for layer, cache in enumerate(flatten(caches)):
            if _is_plain(cache, end):
                plain[layer] = extract_layer(cache, start, end)
            else:
                states[layer] = _own_copy(cache)
        return cls(end - start, plain, states)

    @property
    def nbytes(self) -> int:
        """Bytes held: every array is a whole buffer, so this is all of it."""
        return sum(array.nbytes for array in self.arrays)

    @property
    def arrays(self) -> list[mx.array]:
        """Every array held, to be evaluated by whoever wants the copy made now."""
        plain = [array for layer in self.plain.values() for array in layer]
        states = (self.states or {}).values()
        return plain + [array for cache in states for array in nested_arrays(cache.state)]

    @property
    def is_resumable(self) -> bool:
        """Whether a row can go on at the segment's end."""
        return self.states is not None

    def split(self, position: int) -> tuple["StateSegment", "StateSegment"]:
        """Cut at *position*: there is no state there. ValueError outside the range."""
        if not 0 < position < self.num_tokens:
            raise ValueError(f"can't split {self.num_tokens} tokens at {position}")
        first = StateSegment(position, self._copy(0, position), None)
        rest = self._copy(position, self.num_tokens)
        return first, StateSegment(self.num_tokens - position, rest, self.states)

    def resumable_as(self, other: "StateSegment") -> "StateSegment":
        """Return this segment with the state of *other*, which ends where it ends."""
        return replace(self, states=other.states)

    def _copy(self, start: int, end: int) -> dict[int, Layer]:
        return {layer: copy_layer(kv, start, end) for layer, kv in self.plain.items()}


def restore_states(caches: Seq[Any], prefix: Seq[StateSegment]) -> None:
    """Fill a model's fresh *caches* with adjacent segments from token 0.

    What the segments hold stays as it is: a step that writes into it copies first. Raises
    ValueError when the last of them holds no state.
    """
    states = prefix[-1].states
    if states is None:
        raise ValueError("no row can go on at the end of this prefix")
    for layer, leaf in enumerate(flatten(caches)):
        if layer in states:
            _restore(leaf, states[layer])
            continue
        fill_layer(leaf, [segment.plain[layer] for segment in prefix])


def takes_state(cache: Any) -> bool:
    """Whether a cache can be given a state; else only all that it holds can be copied."""
    prop = getattr(type(cache), "state", None)
    return not isinstance(prop, property) or prop.fset is not None


def _restore(leaf: Any, stored: Any) -> None:
    if takes_state(leaf):
        leaf.state = copy.deepcopy(stored.state)
    else:
        vars(leaf).update(copy.deepcopy(vars(stored)))


def _is_plain(cache: Any, num_tokens: int) -> bool:
    """Whether *cache* holds keys and values of exactly the row's tokens."""
    return is_plain(cache) and cache.keys is not None and cache.offset == num_tokens


def _own_copy(cache: Any) -> Any:
    """Copy a cache with only what later steps use, in buffers of their own."""
    kept = copy.deepcopy(cache)
    if not takes_state(kept):
        vars(kept).update(tree_map(_own_memory, vars(kept)))
        return kept
    if type(kept) is RotatingKVCache and kept.keys is not None and not kept.keep:
        kept.state = _window(kept)
    kept.state = tree_map(_own_memory, kept.state)
    return kept


def _window(cache: Any) -> tuple[Any, ...]:
    """Return the state of a RotatingKVCache without what it will drop before it is next read.

    A prefill leaves the whole chunk behind the window, a decode unused capacity. While the
    window goes round in full buffers, it stays as it is.
    """
    size = cache.keys.shape[2]
    if cache.offset < size:
        keys, values = cache.keys_and_values()
        return keys, values, cache.offset, 0, cache.max_size, cache.offset
    if size > cache.max_size:
        last = size - cache.max_size
        keys, values = cache.keys[..., last:, :], cache.values[..., last:, :]
        return keys, values, cache.offset, 0, cache.max_size, cache.max_size
    state: tuple[Any, ...] = cache.state
    return state


def _own_memory(value: Any) -> Any:
    """Copy an array into a buffer of its own size; other values are immutable already."""
    if not isinstance(value, mx.array) or value.ndim == 0 or value.size == 0:
        return value
    return mx.take(value, mx.arange(value.shape[0]), axis=0)
