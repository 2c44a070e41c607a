"""The tokens that the rows' grammars allow, as a mask for one step."""

from collections.abc import Sequence as Seq

import mlx.core as mx
import numpy as np

from ..sequence import Sequence


class GrammarMasks:
    """The constraints of a fixed set of rows, those without one left out."""

    def __init__(self, rows: Seq[Sequence], vocabulary_size: int) -> None:
        self._size = vocabulary_size
        self._places = [index for index, row in enumerate(rows) if row.constraint is not None]
        self._rows = [rows[index] for index in self._places]
        self._takes_all = len(self._places) == len(rows)
        self._index = mx.array(self._places, dtype=mx.int32)

    def apply(self, logits: mx.array) -> mx.array:
        """Rule out of *logits*, (rows, vocabulary), what the grammars don't allow next.

        Every token of the constrained rows must have been read.
        """
        if not self._rows:
            return logits
        allowed = mx.array(np.stack([self._allowed(row) for row in self._rows]))
        if self._takes_all:
            return mx.where(allowed, logits, -mx.inf)
        masked = mx.array(logits)
        masked[self._index] = mx.where(allowed, logits[self._index], -mx.inf)
        return masked

    def _allowed(self, row: Sequence) -> np.ndarray:
        assert row.constraint is not None
        assert not row.num_unread_tokens, "a grammar must know every token"
        bits = np.frombuffer(row.constraint.allowed(row.output_token_ids), np.uint8)
        return np.unpackbits(bits, count=self._size, bitorder="little").view(np.bool_)
