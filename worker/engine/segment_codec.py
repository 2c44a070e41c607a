"""SegmentCodec: a model's cached segments as host arrays, and back."""

import copy
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import Any, Final

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from ..host_segment import HostSegment
from .runner import DeviceSegment
from .segments import KVSegment, Layer, LayerKV, QuantizedKVSegment, flatten
from .states import StateSegment

_TOKEN_AXIS: Final = 2
_ARRAY: Final = "array"

HostArrays = dict[str, npt.NDArray[Any]]


class ForeignSegment(ValueError):
    """Host arrays that are not those of a segment of this model."""


class SegmentCodec:
    """Lives on the engine thread. Segments of the model all have the layout of one *example*."""

    def __init__(self, caches: Seq[Any], example: DeviceSegment) -> None:
        """*caches* are the model's own, fresh; *example* is what is stored of some row."""
        self._empty = list(flatten(caches))
        self._make: Any = type(example)
        layers: list[Any] = list(_layers(example).values())
        self._make_layer: Any = type(layers[0]) if layers else LayerKV
        self._dtypes: dict[str, mx.Dtype] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        for name, array in _named_arrays(example).items():
            self._dtypes[name] = array.dtype
            self._shapes[name] = _without_tokens(array.shape)

    def to_host(self, path: Seq[DeviceSegment], start: int, end: int) -> HostSegment:
        """Copy tokens [start, end) of adjacent segments from token 0, with the state at *end*.

        Waits for arrays that are still being computed. Without plain layers the tokens have
        nothing but the state, which must be the last segment's.
        """
        arrays: HostArrays = {}
        for name in (name for name in self._dtypes if not name.startswith("state.")):
            arrays[name] = _range([_host(_plain(each)[name]) for each in path], start, end)
        details: dict[str, Any] = {}
        last = path[-1]
        if isinstance(last, StateSegment):
            assert last.states is not None, "no state where the prefix ends"
            for layer, cache in last.states.items():
                details[str(layer)] = _flatten_state(cache.state, f"state.{layer}", arrays)
        return HostSegment(end - start, arrays, details)

    def from_host(self, segment: HostSegment) -> DeviceSegment:
        """Rebuild a segment; raises ForeignSegment unless it has this model's layout."""
        self._check(segment)
        arrays = {name: self._device(name, array) for name, array in segment.arrays.items()}
        plain = self._layers_of(arrays)
        if self._make is not StateSegment:
            made: DeviceSegment = self._make(tuple(plain.values()))
            return made
        states: dict[int, Any] = {}
        for layer, state in segment.details.items():
            cache = copy.deepcopy(self._empty[int(layer)])
            cache.state = _unflatten_state(state, arrays)
            states[int(layer)] = cache
        return StateSegment(segment.num_tokens, plain, states)

    def _layers_of(self, arrays: Mapping[str, mx.array]) -> dict[int, Layer]:
        fields = self._make_layer._fields
        named = (name.split(".") for name in arrays if not name.startswith("state."))
        numbers = sorted(int(number) for field, number in named if field == fields[0])
        return {n: self._make_layer(*(arrays[f"{field}.{n}"] for field in fields)) for n in numbers}

    def _check(self, segment: HostSegment) -> None:
        if segment.arrays.keys() != self._dtypes.keys():
            raise ForeignSegment("it holds other layers")
        for name, array in segment.arrays.items():
            if _without_tokens(array.shape) != self._shapes[name]:
                raise ForeignSegment(f"{name} has shape {array.shape}")
            if array.dtype != _host_dtype(self._dtypes[name]):
                raise ForeignSegment(f"{name} has type {array.dtype}")
            is_plain = not name.startswith("state.")
            if is_plain and array.shape[_TOKEN_AXIS] != segment.num_tokens:
                raise ForeignSegment(f"{name} has {array.shape[_TOKEN_AXIS]} tokens")

    def _device(self, name: str, array: npt.NDArray[Any]) -> mx.array:
        made = mx.array(array)
        dtype = self._dtypes[name]
        return made if made.dtype == dtype else made.view(dtype)


def is_finite(segment: HostSegment) -> bool:
    """Whether no value is NaN or infinite."""
    return all(_all_finite(array) for array in segment.arrays.values())


def _all_finite(array: npt.NDArray[Any]) -> bool:
    if array.dtype == np.uint16:
        # The bits of bfloat16: an exponent of ones is infinity or NaN.
        return not bool(np.any((array & 0x7F80) == 0x7F80))
    return bool(np.all(np.isfinite(array)))


def _named_arrays(segment: DeviceSegment) -> dict[str, mx.array]:
    """Return a segment's arrays by the names that they have on the host."""
    named = dict(_plain(segment))
    if isinstance(segment, StateSegment):
        for layer, cache in (segment.states or {}).items():
            _name_state(cache.state, f"state.{layer}", named)
    return named


def _plain(segment: DeviceSegment) -> Mapping[str, mx.array]:
    """Return keys and values by name."""
    return {
        f"{field}.{number}": array
        for number, layer in _layers(segment).items()
        for field, array in zip(layer._fields, layer, strict=True)
    }


def _layers(segment: DeviceSegment) -> Mapping[int, Layer]:
    """Return the layers with plain keys and values, by number."""
    if isinstance(segment, StateSegment):
        return segment.plain
    assert isinstance(segment, KVSegment | QuantizedKVSegment)
    return dict(enumerate(segment.layers))


def _name_state(state: Any, name: str, named: dict[str, mx.array]) -> None:
    if isinstance(state, mx.array):
        named[name] = state
    elif isinstance(state, list | tuple):
        for index, part in enumerate(state):
            _name_state(part, f"{name}.{index}", named)


def _flatten_state(state: Any, name: str, arrays: HostArrays) -> Any:
    """Return *state* as JSON with names for its arrays, which go into *arrays* as copies."""
    if isinstance(state, mx.array):
        arrays[name] = np.array(_host(state))
        return {_ARRAY: name}
    if isinstance(state, list | tuple):
        parts = enumerate(state)
        return [_flatten_state(part, f"{name}.{index}", arrays) for index, part in parts]
    return state


def _unflatten_state(state: Any, arrays: Mapping[str, mx.array]) -> Any:
    if isinstance(state, dict):
        return arrays[state[_ARRAY]]
    if isinstance(state, list):
        return [_unflatten_state(part, arrays) for part in state]
    return state


def _host(array: mx.array) -> npt.NDArray[Any]:
    """Return a view of an array's memory; it waits until the array is computed."""
    dtype = _host_dtype(array.dtype)
    if array.dtype == mx.bfloat16:
        # On the CPU's stream: the device may be busy with the next step for long.
        array = mx.view(array, mx.uint16, stream=mx.cpu)
    return np.asarray(array, dtype=dtype)


def _host_dtype(dtype: mx.Dtype) -> npt.DTypeLike:
    # NumPy has no bfloat16.
    return np.uint16 if dtype == mx.bfloat16 else str(dtype).removeprefix("mlx.core.")


def _range(pieces: list[npt.NDArray[Any]], start: int, end: int) -> npt.NDArray[Any]:
    """Copy tokens [start, end) of adjacent pieces (1, heads, tokens, D)."""
    parts, position = [], 0
    for piece in pieces:
        first, last = max(0, start - position), min(piece.shape[_TOKEN_AXIS], end - position)
        if first < last:
            parts.append(piece[:, :, first:last])
        position += piece.shape[_TOKEN_AXIS]
    return np.concatenate(parts, axis=_TOKEN_AXIS)


def _without_tokens(shape: Seq[int]) -> tuple[int, ...]:
    """Return a shape without the axis along which keys and values have their tokens."""
    return tuple(shape) if len(shape) != 4 else (*shape[:_TOKEN_AXIS], *shape[_TOKEN_AXIS + 1 :])
