"""Repetition, presence and frequency penalties: counts of each row's tokens, on the device.

The newest token may not have been read yet when the next one is sampled, so the counts live
where it lives: a step adds it there, and pipelined batches stay pipelined. Whatever breaks the
chain (other rows, a preemption, a new attempt) counts anew from the tokens that the host knows.
"""

from collections.abc import Sequence as Seq

import mlx.core as mx
import numpy as np
import numpy.typing as npt
from headwater.schemas import SamplingParams

from ..sequence import Sequence


class Penalties:
    """The penalties of a fixed set of rows, those without any left out."""

    def __init__(self, rows: Seq[Sequence], vocabulary_size: int) -> None:
        self._places = [index for index, row in enumerate(rows) if _has_any(row.job.sampling)]
        self._rows = [rows[index] for index in self._places]
        self._takes_all = len(self._rows) == len(rows)
        self._index = mx.array(self._places, dtype=mx.int32)
        params = [row.job.sampling for row in self._rows]
        self._window = _WindowCounts(self._rows, vocabulary_size)
        self._output = _OutputCounts(self._rows, vocabulary_size)
        self._num_counted: list[int] = []
        """Tokens of each row when its counts were last brought up to date."""
        self._repetition = _column([each.repetition_penalty for each in params])
        self._presence = _column([each.presence_penalty for each in params])
        self._frequency = _column([each.frequency_penalty for each in params])

    def apply(self, logits: mx.array, last_tokens: mx.array | None) -> mx.array:
        """Return *logits*, (rows, vocabulary), with the penalties.

        *last_tokens*, (rows,), is each row's newest token, perhaps not computed yet; None when
        the host knows them all.
        """
        if not self._rows:
            return logits
        own = logits if self._takes_all else logits[self._index]
        last = None if last_tokens is None else last_tokens[self._index]
        own = self._penalize(own, last)
        if self._takes_all:
            return own
        penalized = mx.array(logits)
        penalized[self._index] = own
        return penalized

    def _penalize(self, logits: mx.array, last: mx.array | None) -> mx.array:
        self._count(last)
        if self._window.counts is not None:
            scaled = mx.where(logits < 0, logits * self._repetition, logits / self._repetition)
            logits = mx.where(self._window.counts > 0, scaled, logits)
        if self._output.counts is not None:
            logits = logits - self._presence * (self._output.counts > 0)
            logits = logits - self._frequency * self._output.counts
        return logits

    def _count(self, last: mx.array | None) -> None:
        num_tokens = [row.num_tokens for row in self._rows]
        follows = num_tokens == [before + 1 for before in self._num_counted]
        if follows and last is not None:
            self._window.add(last)
            self._output.add(last)
        else:
            self._window.recount(last)
            self._output.recount(last)
        self._num_counted = num_tokens


class _OutputCounts:
    """How often each row's output holds each token."""

    def __init__(self, rows: Seq[Sequence], vocabulary_size: int) -> None:
        self._rows = rows
        self._size = vocabulary_size
        self._is_needed = any(_counts_output(row.job.sampling) for row in rows)
        self.counts: mx.array | None = None
        """(rows, vocabulary) int32, brought up to date by each call; None if nobody needs them."""

    def add(self, last: mx.array) -> None:
        """Count one more output token of each row."""
        if self.counts is not None:
            self.counts = _add(self.counts, last[:, None], mx.array(1))

    def recount(self, last: mx.array | None) -> None:
        """Count from the start; *last* stands for what the host does not know."""
        if self._is_needed:
            known = [row.output_token_ids for row in self._rows]
            self.counts = _with_unread(_histograms(known, self._size), self._rows, last)


class _WindowCounts:
    """How often each row's last tokens, prompt included, hold each token."""

    def __init__(self, rows: Seq[Sequence], vocabulary_size: int) -> None:
        self._rows = rows
        self._size = vocabulary_size
        self._is_needed = any(row.job.sampling.repetition_penalty != 1 for row in rows)
        self.counts: mx.array | None = None
        """(rows, vocabulary) int32, brought up to date by each call; None if nobody needs them."""

    def add(self, last: mx.array) -> None:
        """Move every window on by one token."""
        if self.counts is None:
            return
        leaving = [_leaving(row) for row in self._rows]
        ids = mx.stack([last, mx.array([token or 0 for token in leaving])], axis=1)
        change = mx.array([[1, 0 if token is None else -1] for token in leaving])
        self.counts = _add(self.counts, ids, change)

    def recount(self, last: mx.array | None) -> None:
        """Count from the start; *last* stands for what the host does not know."""
        if self._is_needed:
            known = [row.tokens(_window_start(row), row.num_known_tokens) for row in self._rows]
            self.counts = _with_unread(_histograms(known, self._size), self._rows, last)


def _has_any(params: SamplingParams) -> bool:
    return params.repetition_penalty != 1 or _counts_output(params)


def _counts_output(params: SamplingParams) -> bool:
    return params.presence_penalty != 0 or params.frequency_penalty != 0


def _window_start(row: Sequence) -> int:
    """Return the position of the window's first token."""
    window = row.job.sampling.repetition_window
    return max(0, row.num_tokens - window) if window else 0


def _leaving(row: Sequence) -> int | None:
    """Return the token that the newest one has pushed out of the window, if any."""
    start = _window_start(row)
    return row.tokens(start - 1, start)[0] if start else None


def _histograms(token_ids: Seq[Seq[int]], size: int) -> npt.NDArray[np.int32]:
    counts = [np.bincount(np.array(ids, dtype=np.int64), minlength=size) for ids in token_ids]
    return np.array(counts, dtype=np.int32)


def _with_unread(
    counts: npt.NDArray[np.int32], rows: Seq[Sequence], last: mx.array | None
) -> mx.array:
    is_unread = [row.num_unread_tokens for row in rows]
    if not any(is_unread):
        return mx.array(counts)
    assert last is not None, "a row's newest token is unknown"
    return _add(mx.array(counts), last[:, None], mx.array(is_unread)[:, None])


def _add(counts: mx.array, ids: mx.array, change: mx.array) -> mx.array:
    """Add *change* at *ids*, (rows, n), of each row; the same id twice counts twice."""
    rows = mx.arange(counts.shape[0])[:, None]
    return counts.at[rows, ids].add(change.astype(mx.int32))


def _column(values: list[float]) -> mx.array:
    return mx.array(values, dtype=mx.float32)[:, None]
