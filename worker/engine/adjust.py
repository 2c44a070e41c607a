"""Token ids whose logits a job changes or rules out, for all rows in one graph."""

from collections.abc import Sequence as Seq

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from ..sequence import Sequence


class Biases:
    """Every row's logit_bias; nothing where no row has one."""

    def __init__(self, rows: Seq[Sequence]) -> None:
        biases = [row.job.sampling.logit_bias for row in rows]
        width = max(map(len, biases), default=0)
        self._ids: mx.array | None = None
        if width:
            # A pad adds nothing to token 0.
            self._ids = mx.array([_padded(list(bias), width, 0) for bias in biases])
            self._values = mx.array([_padded(list(bias.values()), width, 0.0) for bias in biases])

    def apply(self, logits: mx.array) -> mx.array:
        """Add the biases to *logits*, (rows, vocabulary)."""
        if self._ids is None:
            return logits
        rows = mx.arange(logits.shape[0])[:, None]
        return logits.at[rows, self._ids].add(self._values)


class Bans:
    """Token ids that some of the rows must not get."""

    def __init__(self, ids: Seq[Seq[int]]) -> None:
        """*ids* are each row's."""
        self._has_ids = np.array([bool(row) for row in ids])
        width = max(map(len, ids), default=0)
        # A row without ids gets 0: apply() writes there what stands there already.
        padded = [_padded(list(row), width, row[0] if row else 0) for row in ids]
        self._ids = mx.array(padded) if width else None

    def are_due(self, where: npt.NDArray[np.bool_]) -> bool:
        """Whether any of the rows *where* has an id to rule out."""
        return bool((self._has_ids & where).any())

    def apply(self, logits: mx.array, where: npt.NDArray[np.bool_]) -> mx.array:
        """Rule the ids of the rows *where*, (rows,), out of *logits*, (rows, vocabulary)."""
        if self._ids is None or not self.are_due(where):
            return logits
        values = mx.take_along_axis(logits, self._ids, axis=-1)
        values = mx.where(mx.array(self._has_ids & where)[:, None], -mx.inf, values)
        return mx.put_along_axis(logits, self._ids, values, axis=-1)


def _padded(values: list[int] | list[float], width: int, pad: float) -> list[float]:
    return [*values, *[pad] * (width - len(values))]
