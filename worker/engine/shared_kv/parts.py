"""Parts of an attention, each over some of the keys, and how they are put together."""

from typing import NamedTuple

import mlx.core as mx

from .exponential import exp_below_one


class Part(NamedTuple):
    """Attention over some of the keys.

    exp is the dearest operation here, so every score goes through it once; parts are put together
    like the blocks of FlashAttention (Dao et al., 2022).
    """

    output: mx.array
    """(rows, heads, queries, D), in the model's dtype."""
    log_weight: mx.array
    """Log of the weights' sum, (rows, heads, queries, 1), float32: sums of 16 bits overflow."""


def together(parts: list[Part]) -> Part:
    """Return the attention over the keys of all *parts*."""
    output, log_weight = parts[0]
    for part in parts[1:]:
        both = mx.logaddexp(log_weight, part.log_weight)
        ours, theirs = mx.exp(log_weight - both), mx.exp(part.log_weight - both)
        output = output * ours.astype(output.dtype) + part.output * theirs.astype(output.dtype)
        log_weight = both
    return Part(output, log_weight)


def with_sinks(part: Part, sinks: mx.array) -> mx.array:
    """Let *sinks* take their share of the weights: once, whatever the parts were."""
    sinks = sinks.astype(mx.float32)[None, :, None, None]
    share = mx.exp(part.log_weight - mx.logaddexp(part.log_weight, sinks))
    return part.output * share.astype(part.output.dtype)


def joined(parts: list[Part], axis: int) -> Part:
    """Return one part of *parts* that are of different rows or heads, side by side in *axis*."""
    return Part(*(mx.concatenate(list(arrays), axis) for arrays in zip(*parts, strict=True)))


def masked(scores: mx.array, mask: mx.array | None) -> mx.array:
    """Return *scores* with those that a query does not see so low that they weigh nothing."""
    # Not minus infinity: a row that sees nothing here would have no peak. Its sum is so small
    # that it weighs nothing beside the own token, which every query sees.
    return scores if mask is None else mx.where(mask, scores, mx.finfo(scores.dtype).min)


def weights_of(scores: mx.array) -> tuple[mx.array, mx.array]:
    """Return the weights of *scores* (..., T), which sum to one, and the log of their sum."""
    scores = scores.astype(mx.float32)
    peak = mx.max(scores, axis=-1, keepdims=True)
    weights = exp_below_one(scores - peak)
    total = mx.sum(weights, axis=-1, keepdims=True)
    return weights / total, peak + mx.log(total)
