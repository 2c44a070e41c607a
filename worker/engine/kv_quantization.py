"""Keys and values held in 8 or 4 bits: which models allow it, and how their caches are made."""

from collections.abc import Callable
from typing import Any, Final, NamedTuple, TypeAlias

import mlx.core as mx
import structlog
from mlx.nn.layers.base import Module
from mlx_lm.models.cache import CacheList, KVCache, QuantizedKVCache, make_prompt_cache

from ..errors import StartupError
from .row_runner import RowRunner
from .segments import flatten, state_arrays

log = structlog.get_logger()

_GROUP_SIZES: Final = (64, 32)
"""Values that share a scale, along the head dimension; the largest that divides it is taken."""
_PROBE: Final = (11, 5, 3, 8, 2, 9, 4, 6, 1, 10, 7, 3)
_MAX_ERROR: Final = 0.05
"""Of the probe's logits against those of floats that were rounded alike, root mean square over
their spread: room for 16-bit weights."""


CacheKind: TypeAlias = Callable[[int, int], Any]
"""Makes a cache of a group size and a number of bits."""


class KVQuantization(NamedTuple):
    """How plain keys and values are quantized; other state (windows, recurrent) is not."""

    bits: int
    group_size: int

    def make_caches(self, model: Module, kind: CacheKind = QuantizedKVCache) -> list[Any]:
        """Return the caches of a row, empty; the plain ones are of *kind*."""
        return [self._replace_plain(cache, kind) for cache in make_prompt_cache(model)]

    def _replace_plain(self, cache: Any, kind: CacheKind) -> Any:
        if isinstance(cache, CacheList):
            cache.caches = tuple(self._replace_plain(each, kind) for each in cache.caches)
        return kind(self.group_size, self.bits) if type(cache) is KVCache else cache

    @property
    def name(self) -> str:
        """What tells its keys and values from others'."""
        return f"kv {self.bits} bits in groups of {self.group_size}"


class QuantizedRunner(RowRunner):
    """Rows one at a time over quantized keys and values: mlx-lm has no batch form of them."""

    def __init__(self, model: Module, quantization: KVQuantization) -> None:
        super().__init__(model, quantization.make_caches)


def choose_quantization(model: Module, bits: int) -> KVQuantization:
    """Return how to quantize *model*'s keys and values to *bits*, with a warning of the price.

    Raises StartupError for models that can't be served so: attention sinks, attention of their
    own, no plain keys and values, heads of an odd size.
    """
    sizes = _head_sizes(model)
    if not sizes:
        raise _refusal(f"it has no plain keys and values ({_cache_names(model)})")
    fitting = (size for size in _GROUP_SIZES if all(each % size == 0 for each in sizes))
    group_size = next(fitting, None)
    if group_size is None:
        raise _refusal(f"its heads have {sorted(sizes)} numbers, no multiple of 32")
    quantization = KVQuantization(bits, group_size)
    _check(model, quantization)
    log.warning(
        "kv_quantized",
        bits=bits,
        group_size=group_size,
        advice="rows run one at a time: less memory a token, but throughput will not grow with"
        " the number of jobs",
    )
    return quantization


def _refusal(reason: str) -> StartupError:
    return StartupError(
        f"this model's keys and values can't be quantized: {reason}; drop --kv-bits"
    )


def _cache_names(model: Module) -> str:
    return ", ".join(sorted({type(leaf).__name__ for leaf in flatten(make_prompt_cache(model))}))


def _head_sizes(model: Module) -> set[int]:
    """Return the sizes of the heads of plain layers, keys' and values'."""
    caches = make_prompt_cache(model)
    model(mx.array([[0]]), cache=caches)
    plain = (state_arrays([leaf]) for leaf in flatten(caches) if type(leaf) is KVCache)
    return {int(array.shape[-1]) for arrays in plain for array in arrays}


def _check(model: Module, quantization: KVQuantization) -> None:
    """Compare a short prompt's logits with those of floats that were rounded as the codes are."""
    expected = _logits(model, quantization.make_caches(model, _RoundedKVCache))
    try:
        actual = _logits(model, quantization.make_caches(model))
    except Exception as error:  # whatever a model raises that reads keys and values itself
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise _refusal(f"its attention does not take them ({reason})") from error
    error_size = mx.sqrt(mx.mean(mx.square(actual - expected))) / mx.std(expected)
    # Turned round so that NaN, which no comparison holds for, counts as wrong.
    if not float(error_size) <= _MAX_ERROR:
        raise _refusal(f"its logits are off by {float(error_size):.2g} of their spread")


class _RoundedKVCache(KVCache):
    """Floats that have gone through the codes: what a model must get that reads them rightly."""

    def __init__(self, group_size: int, bits: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._group_size = group_size
        self._bits = bits

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> Any:
        rounded = self._round(keys), self._round(values)
        return super().update_and_fetch(*rounded)  # type: ignore[no-untyped-call]

    def _round(self, array: mx.array) -> mx.array:
        codes = mx.quantize(array, self._group_size, self._bits)
        return mx.dequantize(*codes, self._group_size, self._bits)


def _logits(model: Module, caches: list[Any]) -> mx.array:
    """Return the logits behind a chunk and behind single tokens, (positions, vocabulary)."""
    chunks = (_PROBE[:8], *((token,) for token in _PROBE[8:]))
    logits = [model(mx.array([chunk]), cache=caches)[0, -1] for chunk in chunks]
    together = mx.stack(logits).astype(mx.float32)
    mx.eval(together)
    return together
