"""Attention over shared segments and rows' own keys, hooked into mlx-lm's models."""

import sys
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

import mlx.core as mx
from mlx_lm.models import base

from .group import LayerCache, LayerSpan, OwnMask

_NAME = "scaled_dot_product_attention"
_original: Callable[..., mx.array] = base.scaled_dot_product_attention


class _Part(NamedTuple):
    """Attention over some of the keys: (rows, heads, queries, D) and its log of summed weights."""

    output: mx.array
    log_weight: mx.array


def install() -> None:
    """Set the hook on every loaded model module that holds mlx-lm's function.

    Modules loaded later import it from `base`, which has it then. Can be called again.
    """
    for name, module in list(sys.modules.items()):
        if name.startswith("mlx_lm.models.") and module.__dict__.get(_NAME) is _original:
            setattr(module, _NAME, attention)


def attention(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    cache: Any,
    scale: float,
    mask: Any,
    sinks: mx.array | None = None,
) -> mx.array:
    """Attend as mlx-lm does, or over shared segments where *cache* is ours.

    Raises TypeError when a model brings sinks or a mask of its own to a cache of ours.
    """
    if not isinstance(cache, LayerCache):
        return _original(queries, keys, values, cache=cache, scale=scale, mask=mask, sinks=sinks)
    if sinks is not None:
        _refuse("attention sinks")
    if not isinstance(mask, OwnMask):
        _refuse("a mask of the model's own")
    queries = queries * scale
    output, log_weight = _own(queries, keys, values, mask.array)
    for depth in cache.shared():
        part = _by_rows(queries, depth, keys.shape[1])
        total = mx.logaddexp(log_weight, part.log_weight)
        output = output * mx.exp(log_weight - total) + part.output * mx.exp(part.log_weight - total)
        log_weight = total
    return output


def _own(queries: mx.array, keys: mx.array, values: mx.array, mask: mx.array) -> _Part:
    """Attend over each row's own keys (rows, heads, capacity, D)."""
    rows, heads, length, _ = queries.shape
    kv_heads = keys.shape[1]
    grouped = queries.reshape(rows, kv_heads, -1, queries.shape[-1])
    scores = (grouped @ keys.swapaxes(-1, -2)).reshape(rows, kv_heads, -1, length, keys.shape[2])
    scores = mx.where(mask, scores, mx.finfo(scores.dtype).min)
    log_weight = mx.logsumexp(scores, axis=-1, keepdims=True)
    weights = mx.softmax(scores, axis=-1, precise=True)
    output = weights.reshape(rows, kv_heads, -1, keys.shape[2]) @ values
    return _Part(
        output.reshape(rows, heads, length, -1), log_weight.reshape(rows, heads, length, 1)
    )


def _by_rows(queries: mx.array, depth: list[LayerSpan], kv_heads: int) -> _Part:
    """Attend over one depth of the trie: every row has one segment there, or none."""
    outputs: list[mx.array] = []
    log_weights: list[mx.array] = []
    next_row = 0
    value_dim = depth[0].layer.values.shape[-1]
    for span in depth:
        _add_gap(queries, next_row, span.first_row, value_dim, outputs, log_weights)
        keys, values = span.layer
        part = _span(queries[span.first_row : span.last_row], keys, values, kv_heads)
        outputs.append(part.output)
        log_weights.append(part.log_weight)
        next_row = span.last_row
    _add_gap(queries, next_row, queries.shape[0], value_dim, outputs, log_weights)
    if len(outputs) == 1:
        return _Part(outputs[0], log_weights[0])
    return _Part(mx.concatenate(outputs), mx.concatenate(log_weights))


def _add_gap(
    queries: mx.array,
    first: int,
    last: int,
    value_dim: int,
    outputs: list[mx.array],
    log_weights: list[mx.array],
) -> None:
    """Let rows [first, last), which have no segment at this depth, weigh nothing."""
    if first < last:
        shape = (last - first, *queries.shape[1:3])
        outputs.append(mx.zeros((*shape, value_dim), queries.dtype))
        log_weights.append(mx.full((*shape, 1), -mx.inf, queries.dtype))


def _span(queries: mx.array, keys: mx.array, values: mx.array, kv_heads: int) -> _Part:
    """Attend over one segment (1, heads, T, D): one product for all rows and grouped heads."""
    rows, heads, length, dim = queries.shape
    group = heads // kv_heads
    flat = queries.reshape(rows, kv_heads, group, length, dim).transpose(1, 0, 2, 3, 4)
    scores = flat.reshape(kv_heads, -1, dim) @ keys[0].swapaxes(-1, -2)
    log_weight = mx.logsumexp(scores, axis=-1, keepdims=True)
    output = mx.softmax(scores, axis=-1, precise=True) @ values[0]
    return _Part(_back(output, rows, group, length), _back(log_weight, rows, group, length))


def _back(flat: mx.array, rows: int, group: int, length: int) -> mx.array:
    """Turn (kv heads, rows * group * length, D) into (rows, heads, length, D)."""
    split = flat.reshape(flat.shape[0], rows, group, length, -1)
    return split.transpose(1, 0, 2, 3, 4).reshape(rows, flat.shape[0] * group, length, -1)


def _refuse(what: str) -> NoReturn:
    raise TypeError(f"{what} can't be used with shared prefixes: run this model on another runner")
