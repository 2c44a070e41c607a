"""Attention over shared segments and rows' own keys, hooked into mlx-lm's models."""

import sys
from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Any, Final, NamedTuple, NoReturn

import mlx.core as mx
from mlx_lm.models import base

from ..device import is_cpu
from ..segments import LayerKV
from .batch import LayerCache, LayerSpan, OwnMask
from .exponential import exp_below_one
from .joint import JointLayer, JointMask
from .page_index import LayerPages
from .paged import scores_of_pages, values_of_pages
from .products import multiply

_MAX_SCORES: Final = 1 << 18
"""On a CPU, so many are computed at once: more don't stay in its cache between passes."""
_NAME = "scaled_dot_product_attention"
_original: Callable[..., mx.array] = base.scaled_dot_product_attention


class _Part(NamedTuple):
    """Attention over some of the keys.

    exp is the dearest operation here, so every score goes through it once; parts are put together
    like the blocks of FlashAttention (Dao et al., 2022).
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
    own = LayerKV(keys, values)
    parts = [_own(queries, own, cache.own_mask(window), cache.pages(window))]
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


def _own(queries: mx.array, own: LayerKV, mask: mx.array, pages: Seq[LayerPages]) -> _Part:
    """Attend over each row's own keys, (rows, heads, tokens, D), and those in its pages."""
    rows, heads, length, dim = queries.shape
    kv_heads, num_own = own.keys.shape[1:3]
    grouped = queries.reshape(rows, kv_heads, -1, dim)
    scores = multiply(grouped, own.keys.swapaxes(-1, -2))
    scores = _masked(scores.reshape(rows, kv_heads, -1, length, num_own), mask)
    scores = scores.reshape(rows, kv_heads, -1, num_own)
    paged = [_masked(scores_of_pages(grouped, each), each.mask) for each in pages]
    weights, log_weight = _weights(mx.concatenate([scores, *paged], axis=-1) if pages else scores)
    weights = weights.astype(own.values.dtype)
    output = multiply(weights[..., :num_own], own.values)
    first = num_own
    for each, of_pages in zip(pages, paged, strict=True):
        last = first + of_pages.shape[-1]
        output = output + values_of_pages(weights[..., first:last], each)
        first = last
    part = _Part(output, log_weight)
    return _Part(*(array.reshape(rows, heads, length, -1) for array in part))


def _masked(scores: mx.array, mask: mx.array | None) -> mx.array:
    # Not minus infinity: a row that sees nothing here would have no peak. Its sum is so small
    # that it weighs nothing beside the own token, which every query sees.
    return scores if mask is None else mx.where(mask, scores, mx.finfo(scores.dtype).min)


def _weights(scores: mx.array) -> tuple[mx.array, mx.array]:
    """Return the weights of *scores* (..., T), which sum to one, and the log of their sum."""
    scores = scores.astype(mx.float32)
    peak = mx.max(scores, axis=-1, keepdims=True)
    weights = exp_below_one(scores - peak)
    total = mx.sum(weights, axis=-1, keepdims=True)
    return weights / total, peak + mx.log(total)


def _weigh(scores: mx.array, values: mx.array) -> _Part:
    """Weigh *values* (..., T, D) by *scores* (..., queries, T)."""
    weights, log_weight = _weights(scores)
    return _Part(weights.astype(values.dtype) @ values, log_weight)


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
    flat = flat.reshape(kv_heads, -1, dim)
    if is_cpu() and flat.shape[1] * keys.shape[2] * kv_heads > _MAX_SCORES:
        of_heads = [
            _scored(flat[at], keys[0, at], values[0, at], span.mask) for at in _slices(kv_heads)
        ]
        part = _Part(*(mx.concatenate(list(each)) for each in zip(*of_heads, strict=True)))
    else:
        part = _scored(flat, keys[0], values[0], span.mask)
    return _Part(*(_back(array, rows, group, length) for array in part))


def _scored(queries: mx.array, keys: mx.array, values: mx.array, mask: mx.array | None) -> _Part:
    """Attend with (kv heads, queries of all rows, D) over (kv heads, T, D)."""
    scores = queries @ keys.swapaxes(-1, -2)
    if mask is not None:
        rows, _, length, num_keys = mask.shape
        by_row = scores.reshape(scores.shape[0], rows, -1, length, num_keys)
        scores = _masked(by_row, mask).reshape(scores.shape)
    return _weigh(scores, values)


def _slices(num: int) -> list[slice]:
    return [slice(index, index + 1) for index in range(num)]


def _back(flat: mx.array, rows: int, group: int, length: int) -> mx.array:
    """Turn (kv heads, rows * group * length, D) into (rows, heads, length, D)."""
    split = flat.reshape(flat.shape[0], rows, group, length, -1)
    return split.transpose(1, 0, 2, 3, 4).reshape(rows, flat.shape[0] * group, length, -1)


def _refuse_mask() -> NoReturn:
    raise TypeError("a mask of the model's own can't be used with shared prefixes")
