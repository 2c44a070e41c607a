"""Attention over shared segments, depth by depth of the trie."""

from itertools import accumulate
from typing import Final, NamedTuple

import mlx.core as mx

from ..device import is_cpu
from .batch import LayerSpan
from .parts import Part, joined, masked, weights_of

_MAX_SCORES: Final = 1 << 18
"""So many are weighed together: more don't stay in a CPU's cache between passes, and are computed
a head at a time there."""
_MAX_PADDING: Final = 1.5
"""Segments of different lengths are weighed together with so many times the scores at most."""

Run = list[LayerSpan]
"""Adjacent segments of one depth."""


def split_by_size(
    depths: list[list[LayerSpan]], num_queries: int, num_rows: int, num_own: int
) -> tuple[list[Run], list[list[LayerSpan]]]:
    """Return depths that are runs to be weighed together with *num_own* keys, and the others.

    *num_queries* is that of a row, in all heads.
    """
    together: list[Run] = []
    apart: list[list[LayerSpan]] = []
    width = num_own
    for depth in depths:
        runs = _runs(depth, num_queries)
        wider = width + max(map(_num_keys, depth))
        if len(runs) == 1 and wider * num_rows * num_queries <= _MAX_SCORES:
            together += runs
            width = wider
        else:
            apart.append(depth)
    return together, apart


def scores_of_run(queries: mx.array, run: Run) -> mx.array:
    """Multiply *queries*, (kv heads, rows, Q, D), by keys: (rows, kv heads, Q, T).

    Where a row has no segment in *run*, its scores weigh nothing.
    """
    kv_heads, num_rows, num_queries, dim = queries.shape
    first, last = run[0].first_row, run[-1].last_row
    flat = queries[:, first:last].reshape(kv_heads, -1, dim)
    scores = _block_scores(flat, [_block(span, num_queries) for span in run])
    by_row = scores.reshape(kv_heads, last - first, num_queries, -1)
    if last - first < num_rows:
        lowest = mx.finfo(scores.dtype).min
        outside = [(0, 0), (first, num_rows - last), (0, 0), (0, 0)]
        by_row = mx.pad(by_row, outside, constant_values=lowest)
    return by_row.swapaxes(0, 1)


def values_of_run(weights: mx.array, run: Run) -> mx.array:
    """Weigh values by *weights*, (rows, kv heads, Q, T): (rows, kv heads, Q, D)."""
    num_rows, kv_heads, num_queries, num_keys = weights.shape
    first, last = run[0].first_row, run[-1].last_row
    flat = weights[first:last].swapaxes(0, 1).reshape(kv_heads, -1, num_keys)
    output = _block_values(flat, [_block(span, num_queries) for span in run])
    by_row = output.reshape(kv_heads, last - first, num_queries, -1).swapaxes(0, 1)
    if last - first < num_rows:
        by_row = mx.pad(by_row, [(first, num_rows - last), (0, 0), (0, 0), (0, 0)])
    return by_row


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


def _runs(depth: list[LayerSpan], num_queries: int) -> list[Run]:
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


def _run(queries: mx.array, run: Run, kv_heads: int) -> Part:
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
    weights, log_weight = weights_of(_block_scores(queries, blocks))
    return Part(_block_values(weights.astype(blocks[0].values.dtype), blocks), log_weight)


def _block_scores(queries: mx.array, blocks: list[_Block]) -> mx.array:
    """Return (kv heads, queries of all blocks, T), T being that of the longest block."""
    widest = max(block.keys.shape[1] for block in blocks)
    scores = [
        _padded(_scores(queries[:, at], block), widest)
        for at, block in zip(_ranges(blocks), blocks, strict=True)
    ]
    return scores[0] if len(scores) == 1 else mx.concatenate(scores, axis=1)


def _block_values(weights: mx.array, blocks: list[_Block]) -> mx.array:
    """Weigh each block's values by *weights*, (kv heads, queries of all blocks, T)."""
    outputs = [
        weights[:, at, : block.keys.shape[1]] @ block.values
        for at, block in zip(_ranges(blocks), blocks, strict=True)
    ]
    return outputs[0] if len(outputs) == 1 else mx.concatenate(outputs, axis=1)


def _ranges(blocks: list[_Block]) -> list[slice]:
    """Return which queries are whose."""
    ends = list(accumulate(block.num_queries for block in blocks))
    return [slice(end - block.num_queries, end) for end, block in zip(ends, blocks, strict=True)]


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
