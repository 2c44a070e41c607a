"""Repetition, presence and frequency penalties, over the tokens that a row has seen.

Counts live on the host and hold what has been read. The newest token may still be on the
device, so it is counted there, as one more slot beside the known ones: pipelined batches stay
pipelined, and nothing on the device has to be kept in step with preemptions or new attempts.
"""

from collections import Counter
from collections.abc import Sequence as Seq
from typing import Final, NamedTuple

import mlx.core as mx
import numpy as np
import numpy.typing as npt
from headwater.schemas import SamplingParams

from ..sequence import Sequence

_MIN_SLOTS: Final = 64
"""Slots come in powers of two from here on: shapes that change with every step cost memory."""

_Ints = npt.NDArray[np.int32]


class Penalties:
    """The penalties of a fixed set of rows; nothing where no row has any."""

    def __init__(self, rows: Seq[Sequence]) -> None:
        self._rows = rows
        params = [row.job.sampling for row in rows]
        self._is_needed = any(map(_has_any, params))
        if self._is_needed:
            self._histories = [_History(row) for row in rows]
            self._repetition = _column([each.repetition_penalty for each in params])
            self._presence = _column([each.presence_penalty for each in params])
            self._frequency = _column([each.frequency_penalty for each in params])

    def apply(self, logits: mx.array, last_tokens: mx.array | None) -> mx.array:
        """Return *logits*, (rows, vocabulary), with the penalties.

        *last_tokens*, (rows,), is each row's newest token, perhaps not computed yet; None when
        the host knows them all.
        """
        if not self._is_needed:
            return logits
        slots = self._slots()
        if last_tokens is None:
            last_tokens = mx.array([_newest_known(row) for row in self._rows], dtype=mx.int32)
        slots = _with_newest(slots, last_tokens[:, None], self._unread())
        values = mx.take_along_axis(logits, slots.ids, axis=-1)
        scaled = mx.where(values < 0, values * self._repetition, values / self._repetition)
        values = mx.where(slots.in_window > 0, scaled, values)
        values = values - self._presence * (slots.in_output > 0)
        values = values - self._frequency * slots.in_output
        # An id in several slots has the same value in each.
        return mx.put_along_axis(logits, slots.ids, values, axis=-1)

    def _slots(self) -> "_Slots":
        for history in self._histories:
            history.update()
        width = max(_MIN_SLOTS, *(1 << (len(each) - 1).bit_length() for each in self._histories))
        padded = [history.padded(width) for history in self._histories]
        return _Slots(*(mx.array(np.stack(part)) for part in zip(*padded, strict=True)))

    def _unread(self) -> mx.array:
        return mx.array([[row.num_unread_tokens] for row in self._rows], dtype=mx.int32)


class _Slots(NamedTuple):
    """Token ids of each row and how often it has seen them; all (rows, slots) int32."""

    ids: mx.array
    in_window: mx.array
    in_output: mx.array


class _History:
    """The known tokens of one row that its penalties look at, counted."""

    def __init__(self, row: Sequence) -> None:
        self._row = row
        self._has_window = row.job.sampling.repetition_penalty != 1
        self._slot_of: dict[int, int] = {}
        self._ids: _Ints = np.zeros(_MIN_SLOTS, np.int32)
        self._in_window: _Ints = np.zeros(_MIN_SLOTS, np.int32)
        self._in_output: _Ints = np.zeros(_MIN_SLOTS, np.int32)
        self._num_output = 0
        """Output tokens that are counted."""
        self._window_start = self._window_end = _window_start(row)
        """Positions that are counted as the window."""

    def __len__(self) -> int:
        """Return the number of slots."""
        return len(self._slot_of)

    def update(self) -> None:
        """Count what has been read since the last time."""
        row = self._row
        if _counts_output(row.job.sampling):
            self._count(self._in_output, row.output_token_ids[self._num_output :], 1)
            self._num_output = len(row.output_token_ids)
        if self._has_window:
            start = min(_window_start(row), row.num_known_tokens)
            self._count(self._in_window, row.tokens(self._window_end, row.num_known_tokens), 1)
            self._window_end = row.num_known_tokens
            self._count(self._in_window, row.tokens(self._window_start, start), -1)
            self._window_start = start

    def padded(self, width: int) -> tuple[_Ints, _Ints, _Ints]:
        """Return ids and counts of *width* slots; those too many repeat the first."""
        return tuple(self._padded(array, width) for array in self._arrays())  # type: ignore[return-value]

    def _padded(self, array: _Ints, width: int) -> _Ints:
        padded = np.full(width, array[0], np.int32)
        padded[: len(self)] = array[: len(self)]
        return padded

    def _arrays(self) -> tuple[_Ints, _Ints, _Ints]:
        return self._ids, self._in_window, self._in_output

    def _count(self, counts: _Ints, token_ids: list[int], change: int) -> None:
        """Add *change* to one of the two *counts* for each of *token_ids*."""
        is_window = counts is self._in_window
        for token_id, number in Counter(token_ids).items():
            slot = self._slot(token_id)
            # A new slot may have moved the arrays.
            (self._in_window if is_window else self._in_output)[slot] += change * number

    def _slot(self, token_id: int) -> int:
        slot = self._slot_of.setdefault(token_id, len(self._slot_of))
        if slot == len(self._ids):
            self._ids, self._in_window, self._in_output = (
                np.concatenate([array, np.zeros_like(array)]) for array in self._arrays()
            )
        self._ids[slot] = token_id
        return slot


def _with_newest(slots: _Slots, newest: mx.array, unread: mx.array) -> _Slots:
    """Add a slot for the *newest* tokens, (rows, 1), and count those that are *unread*."""
    ids = mx.concatenate([slots.ids, newest], axis=1)
    is_newest = slots.ids == newest
    more = (ids == newest) * unread

    def counts(known: mx.array) -> mx.array:
        of_newest = mx.max(mx.where(is_newest, known, 0), axis=1, keepdims=True)
        return mx.concatenate([known, of_newest], axis=1) + more

    return _Slots(ids, counts(slots.in_window), counts(slots.in_output))


def _has_any(params: SamplingParams) -> bool:
    return params.repetition_penalty != 1 or _counts_output(params)


def _counts_output(params: SamplingParams) -> bool:
    return params.presence_penalty != 0 or params.frequency_penalty != 0


def _window_start(row: Sequence) -> int:
    """Return the position of the window's first token; an unread token is in the window, too."""
    window = row.job.sampling.repetition_window
    return max(0, row.num_tokens - window) if window else 0


def _newest_known(row: Sequence) -> int:
    return row.tokens(row.num_known_tokens - 1, row.num_known_tokens)[0]


def _column(values: list[float]) -> mx.array:
    return mx.array(values, dtype=mx.float32)[:, None]
