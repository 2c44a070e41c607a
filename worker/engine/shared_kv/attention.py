"""Attention over shared segments and rows' own keys, hooked into mlx-lm's models."""

import sys
from collections.abc import Callable
from collections.abc import Sequence as Seq
from itertools import accumulate
from typing import Any, NoReturn

import mlx.core as mx
from mlx_lm.models import base

from ..segments import LayerKV
from .batch import LayerCache, OwnMask
from .depths import Run, by_rows, scores_of_run, split_by_size, values_of_run
from .joint import JointLayer, JointMask
from .page_index import LayerPages
from .paged import scores_of_pages, values_of_pages
from .parts import Part, masked, together, weights_of, with_sinks
from .products import multiply

_NAME = "scaled_dot_product_attention"
_original: Callable[..., mx.array] = base.scaled_dot_product_attention


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
    pages = cache.pages(window)
    num_own = keys.shape[2] + sum(each.width for each in pages)
    rows, heads, length, _ = queries.shape
    runs, apart = split_by_size(cache.shared(window), heads * length, rows, num_own)
    parts = [_at_once(queries, LayerKV(keys, values), cache.own_mask(window), pages, runs)]
    parts += [by_rows(queries, depth, keys.shape[1]) for depth in apart]
    whole = together(parts)
    return whole.output if sinks is None else with_sinks(whole, sinks)


def _at_once(
    queries: mx.array, own: LayerKV, mask: mx.array, pages: Seq[LayerPages], runs: Seq[Run]
) -> Part:
    """Attend over rows' own keys, (rows, heads, tokens, D), their pages, and shared segments."""
    rows, heads, length, dim = queries.shape
    kv_heads, num_own = own.keys.shape[1:3]
    grouped = queries.reshape(rows, kv_heads, -1, dim)
    scores = multiply(grouped, own.keys.swapaxes(-1, -2))
    scores = masked(scores.reshape(rows, kv_heads, -1, length, num_own), mask)
    all_scores = [scores.reshape(rows, kv_heads, -1, num_own)]
    all_scores += [masked(scores_of_pages(grouped, each), each.mask) for each in pages]
    by_head = grouped.swapaxes(0, 1)
    all_scores += [scores_of_run(by_head, run) for run in runs]
    is_one = len(all_scores) == 1
    weights, log_weight = weights_of(
        all_scores[0] if is_one else mx.concatenate(all_scores, axis=-1)
    )
    ends = list(accumulate(each.shape[-1] for each in all_scores))
    shares = mx.split(weights.astype(own.values.dtype), ends[:-1], axis=-1)
    output = multiply(shares[0], own.values)
    for each, share in zip(pages, shares[1:], strict=False):
        output = output + values_of_pages(share, each)
    for run, share in zip(runs, shares[1 + len(pages) :], strict=True):
        output = output + values_of_run(share, run)
    part = Part(output, log_weight)
    return Part(*(array.reshape(rows, heads, length, -1) for array in part))


def _refuse_mask() -> NoReturn:
    raise TypeError("a mask of the model's own can't be used with shared prefixes")
