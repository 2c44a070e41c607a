"""Logprobs of sampled tokens and of the likeliest ones, for the rows that ask for them."""

from collections.abc import Sequence as Seq
from typing import Self

import mlx.core as mx

from ..sequence import Sequence, TokenLogprobs
from .filters import likeliest


class LogprobBlock:
    """Logprobs of some rows of one step; on the device until read() asks for them."""

    def __init__(
        self,
        rows: tuple[Sequence, ...],
        chosen: mx.array,
        top_ids: mx.array | None,
        top_logprobs: mx.array | None,
    ) -> None:
        self._rows = rows
        self._chosen = chosen
        self._top_ids = top_ids
        self._top_logprobs = top_logprobs

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
        logits = logits.astype(mx.float32)
        total = mx.logsumexp(logits, axis=-1, keepdims=True)
        # A row without a token has a negative one; it fails, and nobody looks at its logprob.
        token_ids = mx.maximum(tokens, 0)[:, None]
        chosen = mx.take_along_axis(logits, token_ids, axis=-1) - total
        asking = tuple(rows[place] for place in places)
        width = min(max(row.job.logprobs or 0 for row in asking), logits.shape[-1])
        if width == 0:
            return cls(asking, chosen[:, 0], None, None)
        top_ids = likeliest(logits, width)
        top_logprobs = mx.take_along_axis(logits, top_ids, axis=-1) - total
        return cls(asking, chosen[:, 0], top_ids, top_logprobs)

    @property
    def arrays(self) -> list[mx.array]:
        """What the device has to compute."""
        arrays = (self._chosen, self._top_ids, self._top_logprobs)
        return [array for array in arrays if array is not None]

    def read(self) -> dict[Sequence, TokenLogprobs]:
        """Wait for the values."""
        chosen: list[float] = self._chosen.tolist()  # type: ignore[assignment]
        empty: list[list[float]] = [[]] * len(chosen)
        ids: list[list[int]] = empty if self._top_ids is None else self._top_ids.tolist()  # type: ignore[assignment]
        values: list[list[float]] = (
            empty if self._top_logprobs is None else self._top_logprobs.tolist()  # type: ignore[assignment]
        )
        found = {}
        for place, row in enumerate(self._rows):
            num_top = row.job.logprobs or 0
            found[row] = TokenLogprobs(chosen[place], ids[place][:num_top], values[place][:num_top])
        return found
