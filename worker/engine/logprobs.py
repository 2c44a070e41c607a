"""Logprobs of sampled tokens and of the likeliest ones, for the rows that ask for them."""

from collections.abc import Sequence as Seq
from typing import NamedTuple, Self

import mlx.core as mx

from ..sequence import Sequence, TokenLogprobs
from .filters import likeliest


class PositionArrays(NamedTuple):
    """Logprobs of a token at each of some positions, and of the likeliest tokens there."""

    chosen: mx.array
    """(positions,)"""
    top_ids: mx.array | None
    """(positions, number of the likeliest)"""
    top_logprobs: mx.array | None

    @classmethod
    def of(cls, logits: mx.array, tokens: mx.array, num_top: int) -> Self:
        """Take them from *logits*, (positions, vocabulary), for *tokens*, (positions,)."""
        logits = logits.astype(mx.float32)
        total = mx.logsumexp(logits, axis=-1, keepdims=True)
        chosen = (mx.take_along_axis(logits, tokens[:, None], axis=-1) - total)[:, 0]
        width = min(num_top, logits.shape[-1])
        if width == 0:
            return cls(chosen, None, None)
        top_ids = likeliest(logits, width)
        return cls(chosen, top_ids, mx.take_along_axis(logits, top_ids, axis=-1) - total)

    @property
    def arrays(self) -> list[mx.array]:
        """What the device has to compute."""
        return [array for array in self if array is not None]

    def read(self) -> list[TokenLogprobs]:
        """Wait for the values."""
        chosen: list[float] = self.chosen.tolist()  # type: ignore[assignment]
        empty: list[list[float]] = [[]] * len(chosen)
        ids: list[list[int]] = empty if self.top_ids is None else self.top_ids.tolist()  # type: ignore[assignment]
        values: list[list[float]] = (
            empty if self.top_logprobs is None else self.top_logprobs.tolist()  # type: ignore[assignment]
        )
        return [TokenLogprobs(*each) for each in zip(chosen, ids, values, strict=True)]


class LogprobBlock:
    """Logprobs of some rows of one step; on the device until read() asks for them."""

    def __init__(self, rows: tuple[Sequence, ...], positions: "PositionArrays") -> None:
        self._rows = rows
        self._positions = positions

    @classmethod
    def of(cls, logits: mx.array, tokens: mx.array, rows: Seq[Sequence]) -> Self | None:
        """Return the block of those of *rows* that ask for logprobs; None if nobody does.

        *logits* is the model's own (rows, vocabulary), *tokens* (rows,) was drawn of it.
        """
        places = [index for index, row in enumerate(rows) if row.job.logprobs is not None]
        if not places:
            return None
        if len(places) < len(rows):
            index = mx.array(places)
            logits, tokens = logits[index], tokens[index]
        # A row without a token has a negative one; it fails, and nobody looks at its logprob.
        num_top = [rows[place].job.logprobs or 0 for place in places]
        arrays = PositionArrays.of(logits, mx.maximum(tokens, 0), max(num_top))
        return cls(tuple(rows[place] for place in places), arrays)

    @property
    def arrays(self) -> list[mx.array]:
        """What the device has to compute."""
        return self._positions.arrays

    def read(self) -> dict[Sequence, TokenLogprobs]:
        """Wait for the values."""
        found = {}
        for row, (logprob, ids, values) in zip(self._rows, self._positions.read(), strict=True):
            num_top = row.job.logprobs or 0
            found[row] = TokenLogprobs(logprob, ids[:num_top], values[:num_top])
        return found
