"""Attention over shared segments, depth by depth of the trie."""

from typing import Final, NamedTuple

import mlx.core as mx

from ..device import is_cpu
from .batch import LayerSpan
from .parts import Part, joined, masked, weights_of

_MAX_SCORES: Final = 1 << 18
"""On a CPU, so many are computed at once: more don't stay in its cache between passes."""
_MAX_PADDING: Final = 1.5
"""Segments of different lengths are weighed together with so many times the scores at most."""


def by_rows(queries: mx.array, depth: list[LayerSpan], kv_heads: int) -> Part:
    """Attend over one depth of the trie: every row has one segment there, or none."""
    parts: list[Part] = []
    next_row = 0
    shape = (*queries.shape[1:3], depth[0].layer.values.shape[-1])
    for run in _runs(depth, queries.shape[1] * queries.shape[2]):
        parts += _gap(run[0].first_row - next_row, shape, queries.dtype)
        next_row = run[-1].last_row
        parts.append(_run(queries[run[0].first_row : next_row], run, kv_heads))
    parts += _gap(queries.shape[0] - next_row, shape, queries.dtype)
    return parts[0] if len(parts) == 1 else joined(parts, axis=0)


def _runs(depth: list[LayerSpan], num_queries: int) -> list[list[LayerSpan]]:
    """Put adjacent spans together that cost less as one padded block: fewer operations.

    *num_queries* is that of a row, in all heads.
    """
    runs = [depth[:1]]
    for span in depth[1:]:
        run = [*runs[-1], span]
        num_rows = span.last_row - run[0].first_row
        num_padded = num_rows * max(_num_keys(each) for each in run)
        num_scores = sum((each.last_row - each.first_row) * _num_keys(each) for each in run)
        is_adjacent = runs[-1][-1].last_row == span.first_row
        is_small = num_padded * num_queries <= _MAX_SCORES
        if is_adjacent and is_small and num_padded <= _MAX_PADDING * num_scores:
            runs[-1] = run
        else:
            runs.append([span])
    return runs


def _num_keys(span: LayerSpan) -> int:
    return span.layer.keys.shape[2]


def _gap(num_rows: int, shape: tuple[int, ...], dtype: mx.Dtype) -> list[Part]:
    """Return a part in which *num_rows* rows, which have no segment there, weigh nothing."""
    if not num_rows:
        return []
    log_weight = mx.full((num_rows, *shape[:2], 1), -mx.inf, mx.float32)
    return [Part(mx.zeros((num_rows, *shape), dtype), log_weight)]


def _run(queries: mx.array, run: list[LayerSpan], kv_heads: int) -> Part:
    """Attend over adjacent segments: one product each for all its rows and grouped heads."""
    rows, heads, length, dim = queries.shape
    group = heads // kv_heads
    flat = queries.reshape(rows, kv_heads, group, length, dim).transpose(1, 0, 2, 3, 4)
    flat = flat.reshape(kv_heads, -1, dim)
    blocks = [_block(span, group * length) for span in run]
    num_scores = flat.shape[1] * max(_num_keys(span) for span in run) * kv_heads
    if is_cpu() and num_scores > _MAX_SCORES:
        by_head = [
            _attend(flat[at], [each.of_heads(at) for each in blocks]) for at in _slices(kv_heads)
        ]
        part = joined(by_head, axis=0)
    else:
        part = _attend(flat, blocks)
    return Part(*(_back(array, rows, group, length) for array in part))


class _Block(NamedTuple):
    """Adjacent queries, and the keys that all of them see."""

    num_queries: int
    keys: mx.array
    """(kv heads, T, D)."""
    values: mx.array
    mask: mx.array | None
    """(rows, 1, queries, T); None where every query sees every key."""

    def of_heads(self, at: slice) -> "_Block":
        """Return the block with some of the heads."""
        return self._replace(keys=self.keys[at], values=self.values[at])


def _block(span: LayerSpan, num_queries_of_row: int) -> _Block:
    # Not `[0]`: an index makes MLX copy what it picks, at every step.
    keys, values = (array.squeeze(0) for array in span.layer)
    num_queries = (span.last_row - span.first_row) * num_queries_of_row
    return _Block(num_queries, keys, values, span.mask)


def _attend(queries: mx.array, blocks: list[_Block]) -> Part:
    """Attend with *queries*, (kv heads, queries of all blocks, D), each over its block's keys."""
    widest = max(block.keys.shape[1] for block in blocks)
    scores = []
    ranges: list[slice] = []
    first = 0
    for block in blocks:
        ranges.append(slice(first, first + block.num_queries))
        first += block.num_queries
        scores.append(_padded(_scores(queries[:, ranges[-1]], block), widest))
    weights, log_weight = weights_of(scores[0] if len(scores) == 1 else mx.concatenate(scores, 1))
    weights = weights.astype(blocks[0].values.dtype)
    outputs = [
        weights[:, at, : block.keys.shape[1]] @ block.values
        for at, block in zip(ranges, blocks, strict=True)
    ]
    return Part(outputs[0] if len(outputs) == 1 else mx.concatenate(outputs, 1), log_weight)


def _scores(queries: mx.array, block: _Block) -> mx.array:
    scores = queries @ block.keys.swapaxes(-1, -2)
    if block.mask is None:
        return scores
    rows, _, length, num_keys = block.mask.shape
    by_row = scores.reshape(scores.shape[0], rows, -1, length, num_keys)
    return masked(by_row, block.mask).reshape(scores.shape)


def _padded(scores: mx.array, width: int) -> mx.array:
    missing = width - scores.shape[-1]
    if not missing:
        return scores
    lowest = mx.finfo(scores.dtype).min
    return mx.pad(scores, [(0, 0), (0, 0), (0, missing)], constant_values=lowest)


def _slices(num: int) -> list[slice]:
    return [slice(index, index + 1) for index in range(num)]


def _back(flat: mx.array, rows: int, group: int, length: int) -> mx.array:
    """Turn (kv heads, rows * group * length, D) into (rows, heads, length, D)."""
    split = flat.reshape(flat.shape[0], rows, group, length, -1)
    return split.transpose(1, 0, 2, 3, 4).reshape(rows, flat.shape[0] * group, length, -1)
