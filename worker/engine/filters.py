"""Top-k, top-p, min-p and temperature over the head of the order, exact or known not to be."""

from collections.abc import Sequence as Seq
from typing import Final, NamedTuple

import mlx.core as mx
import numpy as np
import numpy.typing as npt
from headwater.schemas import SamplingParams

from .device import is_asynchronous

_MIN_HEAD: Final = 64
_MAX_HEAD: Final = 1024
"""Tokens of the order that are looked at first, a power of two in between."""
_LONG_HEAD: Final = 8192
"""Looked at next, by the rows for which that was not enough: far cheaper than the whole order."""


class Filters(NamedTuple):
    """The drawing rows' parameters; arrays are (rows, 1) and float32 but for top_k."""

    inverse_temperature: mx.array
    top_k: mx.array
    """The vocabulary's size where it keeps all."""
    top_p: mx.array
    """Infinite where it keeps all."""
    log_min_p: mx.array
    """Minus infinity where it keeps all."""
    top_p_rows: mx.array | None
    """Indices of the rows that have one, (n,); None where no row has."""
    unfiltered_rows: mx.array | None
    """Indices of the rows that keep all, likewise."""
    head: int
    """How many tokens of the order to look at first."""
    is_head_enough: bool
    """Whether no row can need more than the head."""
    vocabulary_size: int

    @classmethod
    def of(cls, rows: Seq[SamplingParams], vocabulary_size: int) -> "Filters":
        """Lay the parameters of rows with a temperature above zero out as arrays."""
        head = _head(rows, vocabulary_size)
        unfiltered = [not row.top_k and row.top_p == 1 and row.min_p == 0 for row in rows]
        return cls(
            inverse_temperature=1 / _column([row.temperature for row in rows]),
            top_k=mx.array([[row.top_k or vocabulary_size] for row in rows]),
            top_p=_column([row.top_p if row.top_p < 1 else float("inf") for row in rows]),
            log_min_p=mx.log(_column([row.min_p for row in rows])),
            top_p_rows=_indices([row.top_p < 1 for row in rows]),
            unfiltered_rows=_indices(unfiltered),
            head=head,
            is_head_enough=head == vocabulary_size or all(0 < row.top_k < head for row in rows),
            vocabulary_size=vocabulary_size,
        )

    @property
    def longer_head(self) -> int | None:
        """How many tokens to look at next; None where that may as well be all."""
        is_long = self.head >= _LONG_HEAD or self.vocabulary_size <= 2 * _LONG_HEAD
        return None if is_long else _LONG_HEAD


def _head_on_host(logits: npt.NDArray[np.float32], size: int) -> mx.array:
    """Return the ids of the *size* highest logits of each row, ascending; of ties the first.

    Where the device is the CPU nothing is gained by leaving it to MLX, which takes five times
    as long.
    """
    edges = -np.partition(-logits, size - 1, axis=-1)[:, size - 1]
    heads = []
    for row, edge in zip(logits, edges, strict=True):
        above = np.flatnonzero(row > edge)
        ids = np.sort(np.append(above, np.flatnonzero(row == edge)[: size - above.size]))
        # A row of NaN has no order; it fails, whatever is drawn for it.
        heads.append(ids if ids.size == size else np.arange(size))
    return mx.array(np.array(heads, dtype=np.uint32))


def _sum_exp(values: mx.array) -> mx.array:
    """Sum the exponentials of each row, (rows, 1)."""
    if is_asynchronous():
        return mx.sum(mx.exp(values), axis=-1, keepdims=True)
    # As above: five times as fast.
    return mx.array(np.exp(np.array(values)).sum(axis=-1, keepdims=True))


class Choice(NamedTuple):
    """Drawn tokens, (rows,) int32, and whether the whole vocabulary would have given them."""

    tokens: mx.array
    is_sure: mx.array


def choose(logits: mx.array, filters: Filters, uniform: mx.array) -> Choice:
    """Draw from the head of the order; *logits* (rows, vocabulary), *uniform* (rows, 1)."""
    size = filters.head
    if size == logits.shape[-1]:
        tokens = choose_among_all(logits, filters, uniform)
        return Choice(tokens, mx.ones(tokens.shape, dtype=mx.bool_))
    return _walk(logits, likeliest(logits, size), filters, uniform)


def likeliest(logits: mx.array, size: int) -> mx.array:
    """Return the ids of the *size* highest *logits*, (rows, size), in descending order."""
    if size == logits.shape[-1]:
        return mx.argsort(-logits, axis=-1)
    if is_asynchronous():
        head = mx.sort(mx.argpartition(-logits, kth=size - 1, axis=-1)[:, :size], axis=-1)
    else:
        head = _head_on_host(np.array(logits), size)
    # Its ids ascend: this sort is stable, so ties stand by token id.
    order = mx.argsort(-mx.take_along_axis(logits, head, axis=-1), axis=-1)
    return mx.take_along_axis(head, order, axis=-1)


def choose_among_all(logits: mx.array, filters: Filters, uniform: mx.array) -> mx.array:
    """Draw with the whole vocabulary in order: always right, about ten times the time."""
    return _walk(logits, likeliest(logits, logits.shape[-1]), filters, uniform).tokens


def _walk(logits: mx.array, ids: mx.array, filters: Filters, uniform: mx.array) -> Choice:
    """Walk the tokens *ids*, (rows, n) in descending order, up to the uniform number."""
    values = mx.take_along_axis(logits, ids, axis=-1)
    peak = values[:, :1]
    weights = mx.exp((values - peak) * filters.inverse_temperature)
    cumulative = mx.cumsum(weights, axis=-1)
    num_kept = _num_kept(logits, values, weights, filters)
    total = mx.take_along_axis(cumulative, num_kept - 1, axis=-1)
    is_sure = num_kept < ids.shape[1]
    if (rows := filters.unfiltered_rows) is not None:
        scaled = (logits[rows] - peak[rows]) * filters.inverse_temperature[rows]
        total[rows] = _sum_exp(scaled)
        is_within = uniform[rows] * total[rows] < cumulative[rows, -1:]
        is_sure[rows] = is_sure[rows] | is_within
    passed = mx.sum(cumulative <= uniform * total, axis=-1, keepdims=True)
    tokens = mx.take_along_axis(ids, mx.minimum(passed, num_kept - 1), axis=-1)
    return Choice(tokens[:, 0].astype(mx.int32), is_sure[:, 0])


def _num_kept(logits: mx.array, values: mx.array, weights: mx.array, filters: Filters) -> mx.array:
    """Count the tokens of the order that every filter keeps, (rows, 1)."""
    peak = values[:, :1]
    # A weight of zero is an id that is ruled out, or one that no number can reach.
    is_kept = (weights > 0) & (mx.arange(values.shape[1]) < filters.top_k)
    is_kept = is_kept & (values >= peak + filters.log_min_p)
    if (rows := filters.top_p_rows) is not None:
        mass_above = mx.cumsum(mx.exp(values[rows] - peak[rows]), axis=-1, inclusive=False)
        mass = _sum_exp(logits[rows] - peak[rows])
        is_kept[rows] = is_kept[rows] & (mass_above < filters.top_p[rows] * mass)
    return mx.sum(is_kept, axis=-1, keepdims=True)


def _head(rows: Seq[SamplingParams], vocabulary_size: int) -> int:
    """A power of two above every top-k; the largest where a row may need any number.

    Its cost hardly depends on its size, that of the whole order is ten times as high.
    """
    longest = max(row.top_k or _MAX_HEAD for row in rows)
    return min(max(_MIN_HEAD, min(_MAX_HEAD, 1 << longest.bit_length())), vocabulary_size)


def _indices(flags: list[bool]) -> mx.array | None:
    found = [index for index, flag in enumerate(flags) if flag]
    return mx.array(found) if found else None


def _column(values: list[float]) -> mx.array:
    return mx.array(values, dtype=mx.float32)[:, None]
