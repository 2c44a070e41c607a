"""Attention over shared segments and rows' own keys, hooked into mlx-lm's models."""

import sys
from collections.abc import Callable
from functools import cache as memoize
from typing import Any, NamedTuple, NoReturn

import mlx.core as mx
from mlx_lm.models import base

from ..segments import LayerKV
from .batch import LayerCache, LayerSpan, OwnMask
from .joint import JointLayer, JointMask
from .pool import PageIndex

_NAME = "scaled_dot_product_attention"
_original: Callable[..., mx.array] = base.scaled_dot_product_attention


class _Part(NamedTuple):
    """Attention over some of the keys.

    exp is by far the dearest operation here (on a CPU 14 ns an element), so every score goes
    through it once; parts are put together like the blocks of FlashAttention (Dao et al., 2022).
    """

    output: mx.array
    """(rows, heads, queries, D), in the model's dtype."""
    log_weight: mx.array
    """Log of the weights' sum, (rows, heads, queries, 1), float32: sums of 16 bits overflow."""


def install() -> None:
    """Set the hook on every loaded model module that holds mlx-lm's function.

    Modules loaded later import it from `base`, which has it then. Can be called again.
    """
    for name, module in list(sys.modules.items()):
        if name.startswith("mlx_lm.models.") and module.__dict__.get(_NAME) is _original:
            setattr(module, _NAME, attention)


def attention(
    queries: mx.array,
    keys: Any,
    values: Any,
    cache: Any,
    scale: float,
    mask: Any,
    sinks: mx.array | None = None,
) -> mx.array:
    """Attend as mlx-lm does, or over shared segments where *cache* is ours.

    *sinks*, (heads,), are scores of keys without values. Raises TypeError when a model brings a
    mask of its own to a cache of ours.
    """
    if isinstance(cache, JointLayer):
        if not isinstance(mask, JointMask):
            _refuse_mask()
        pieces = cache.split(queries, keys, values, mask)
        return cache.join([attention(*piece[:4], scale, piece.mask, sinks) for piece in pieces])
    if not isinstance(cache, LayerCache):
        return _original(queries, keys, values, cache=cache, scale=scale, mask=mask, sinks=sinks)
    if not isinstance(mask, OwnMask):
        _refuse_mask()
    window = cache.window(mask)
    queries = queries * scale
    parts = [_own(queries, keys, values, cache.own_mask(window))]
    parts += [_paged(queries, *pages) for pages in cache.pages(window)]
    parts += [_by_rows(queries, depth, keys.shape[1]) for depth in cache.shared(window)]
    whole = _together(parts)
    return whole.output if sinks is None else _with_sinks(whole, sinks)


def _together(parts: list[_Part]) -> _Part:
    """Return the attention over the keys of all *parts*."""
    output, log_weight = parts[0]
    for part in parts[1:]:
        both = mx.logaddexp(log_weight, part.log_weight)
        ours, theirs = mx.exp(log_weight - both), mx.exp(part.log_weight - both)
        output = output * ours.astype(output.dtype) + part.output * theirs.astype(output.dtype)
        log_weight = both
    return _Part(output, log_weight)


def _with_sinks(part: _Part, sinks: mx.array) -> mx.array:
    """Let *sinks* take their share of the weights: once, whatever the parts were."""
    sinks = sinks.astype(mx.float32)[None, :, None, None]
    share = mx.exp(part.log_weight - mx.logaddexp(part.log_weight, sinks))
    return part.output * share.astype(part.output.dtype)


def _own(queries: mx.array, keys: mx.array, values: mx.array, mask: mx.array) -> _Part:
    """Attend over each row's own keys (rows, heads, tokens, D)."""
    rows, heads, length, _ = queries.shape
    kv_heads = keys.shape[1]
    grouped = queries.reshape(rows, kv_heads, -1, queries.shape[-1])
    scores = (grouped @ keys.swapaxes(-1, -2)).reshape(rows, kv_heads, -1, length, keys.shape[2])
    scores = _masked(scores, mask)
    weights, log_weight = _weights(scores.reshape(rows, kv_heads, -1, keys.shape[2]))
    part = _Part(weights.astype(values.dtype) @ values, log_weight)
    return _Part(*(array.reshape(rows, heads, length, -1) for array in part))


def _masked(scores: mx.array, mask: mx.array | None) -> mx.array:
    # Not minus infinity: a row that sees nothing here would have no peak. Its sum is so small
    # that it weighs nothing beside the own token, which every query sees.
    return scores if mask is None else mx.where(mask, scores, mx.finfo(scores.dtype).min)


def _weights(scores: mx.array) -> tuple[mx.array, mx.array]:
    """Return the weights of *scores* (..., T), which sum to one, and the log of their sum."""
    scores = scores.astype(mx.float32)
    peak = mx.max(scores, axis=-1, keepdims=True)
    weights = mx.exp(scores - peak)
    total = mx.sum(weights, axis=-1, keepdims=True)
    return weights / total, peak + mx.log(total)


def _weigh(scores: mx.array, values: mx.array) -> _Part:
    """Weigh *values* (..., T, D) by *scores* (..., queries, T)."""
    weights, log_weight = _weights(scores)
    return _Part(weights.astype(values.dtype) @ values, log_weight)


def _paged(queries: mx.array, layer: LayerKV, index: PageIndex, mask: mx.array | None) -> _Part:
    """Attend over each row's pages of a slab, (pages, heads, tokens, D)."""
    rows, heads, length, dim = queries.shape
    kv_heads = layer.keys.shape[1]
    of_query, of_page = index.matrices(kv_heads)
    flat = queries.reshape(rows * kv_heads, -1, dim)
    keys, values = (array.reshape(-1, *array.shape[2:]) for array in layer)
    scores = _products(flat, keys.swapaxes(-1, -2), of_query, of_page)
    weights, log_weight = _weights(_masked(scores, mask))
    weights = weights.astype(values.dtype).reshape(-1, *weights.shape[2:])
    each = mx.arange(weights.shape[0]).reshape(of_page.shape)
    output = _products(weights, values, each, of_page)
    part = _by_row(_Part(output, log_weight), index)
    return _Part(*(array.reshape(rows, heads, length, -1) for array in part))


def _by_row(part: _Part, index: PageIndex) -> _Part:
    """Put a row's pages together: (entries, heads, queries, D) to (rows, heads, queries, D)."""
    log_weight = mx.where(index.is_page, part.log_weight, -mx.inf)[index.of_row]
    # A row may have no page here: it weighs nothing, and nothing divides by zero.
    peak = mx.maximum(mx.max(log_weight, axis=1, keepdims=True), mx.finfo(mx.float32).min)
    weights = mx.exp(log_weight - peak)
    total = mx.sum(weights, axis=1)
    # Pads are computed of another row's page, which need not be finite: no weight hides that.
    output = mx.where(index.is_page, part.output, 0)[index.of_row]
    output = mx.sum(output * weights.astype(output.dtype), axis=1)
    output = output / mx.maximum(total, 1e-30).astype(output.dtype)
    return _Part(output, peak[:, 0] + mx.log(total))


def _products(left: mx.array, right: mx.array, of_left: mx.array, of_right: mx.array) -> mx.array:
    """Multiply matrices chosen by index; *right* is not copied where MLX can do without."""
    if _can_gather(right.dtype):
        return mx.gather_mm(left, right, of_left, of_right)
    return left[of_left] @ right[of_right]


@memoize
def _can_gather(dtype: mx.Dtype) -> bool:
    """Try: on a CPU it is made for float32 only."""
    ones = mx.ones((1, 1, 1), dtype)
    try:
        mx.eval(mx.gather_mm(ones, ones, mx.array([0]), mx.array([0])))
    except RuntimeError:
        return False
    return True


def _by_rows(queries: mx.array, depth: list[LayerSpan], kv_heads: int) -> _Part:
    """Attend over one depth of the trie: every row has one segment there, or none."""
    parts: list[_Part] = []
    next_row = 0
    shape = (*queries.shape[1:3], depth[0].layer.values.shape[-1])
    for span in depth:
        parts += _gap(span.first_row - next_row, shape, queries.dtype)
        parts.append(_span(queries[span.first_row : span.last_row], span, kv_heads))
        next_row = span.last_row
    parts += _gap(queries.shape[0] - next_row, shape, queries.dtype)
    if len(parts) == 1:
        return parts[0]
    return _Part(*(mx.concatenate(list(arrays)) for arrays in zip(*parts, strict=True)))


def _gap(num_rows: int, shape: tuple[int, ...], dtype: mx.Dtype) -> list[_Part]:
    """Return a part in which *num_rows* rows, which have no segment there, weigh nothing."""
    if not num_rows:
        return []
    log_weight = mx.full((num_rows, *shape[:2], 1), -mx.inf, mx.float32)
    return [_Part(mx.zeros((num_rows, *shape), dtype), log_weight)]


def _span(queries: mx.array, span: LayerSpan, kv_heads: int) -> _Part:
    """Attend over one segment (1, heads, T, D): one product for all rows and grouped heads."""
    keys, values = span.layer
    rows, heads, length, dim = queries.shape
    group = heads // kv_heads
    flat = queries.reshape(rows, kv_heads, group, length, dim).transpose(1, 0, 2, 3, 4)
    scores = flat.reshape(kv_heads, -1, dim) @ keys[0].swapaxes(-1, -2)
    if span.mask is not None:
        grouped = scores.reshape(kv_heads, rows, group, length, -1)
        scores = _masked(grouped, span.mask).reshape(scores.shape)
    part = _weigh(scores, values[0])
    return _Part(*(_back(array, rows, group, length) for array in part))


def _back(flat: mx.array, rows: int, group: int, length: int) -> mx.array:
    """Turn (kv heads, rows * group * length, D) into (rows, heads, length, D)."""
    split = flat.reshape(flat.shape[0], rows, group, length, -1)
    return split.transpose(1, 0, 2, 3, 4).reshape(rows, flat.shape[0] * group, length, -1)


def _refuse_mask() -> NoReturn:
    raise TypeError("a mask of the model's own can't be used with shared prefixes")
