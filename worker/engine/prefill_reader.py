"""PrefillReader: who looks at a prompt's forward itself, not only at what comes after it."""

from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Protocol

import mlx.core as mx

from ..sequence import Sequence
from .projection import Projection


class PrefillReader(Protocol):
    """Asked about each row of a prefill."""

    def positions(self, sequence: Sequence) -> Seq[int]:
        """Return the positions in the row's chunk whose logits it wants."""
        ...

    def take_states(self, sequence: Sequence, states: mx.array) -> None:
        """Take the last layer's states of the chunk, (tokens, size).

        Not called by a model whose output layer can't be told which positions to project.
        """
        ...

    def take_logits(self, sequence: Sequence, logits: mx.array) -> None:
        """Take the logits at the wanted positions, (positions, vocabulary)."""
        ...


def forward_with_reader(
    projection: Projection,
    forward: Callable[[], mx.array],
    rows: Seq[Sequence],
    lengths: Seq[int],
    reader: PrefillReader,
) -> mx.array:
    """Run *forward* over right-padded rows; return the logits after each, (rows, vocabulary)."""
    width = max(lengths)
    wanted = [reader.positions(row) for row in rows]
    # All positions of all rows as one row: the output layer computes no pads.
    places = [index * width + length - 1 for index, length in enumerate(lengths)]
    places += [index * width + each for index, some in enumerate(wanted) for each in some]

    def select(hidden: mx.array) -> mx.array:
        for index, row in enumerate(rows):
            reader.take_states(row, hidden[index, : lengths[index]])
        return _pick(hidden, places)

    with projection.only(select):
        logits = forward()
    if not projection.is_selective:
        logits = _pick(logits, places)
    start = len(rows)
    for row, positions in zip(rows, wanted, strict=True):
        if positions:
            reader.take_logits(row, logits[0, start : start + len(positions)])
            start += len(positions)
    return logits[0, : len(rows)]


def _pick(values: mx.array, places: Seq[int]) -> mx.array:
    """Return (1, places, size) of *values*, (rows, tokens, size)."""
    return values.reshape(-1, values.shape[-1])[mx.array(list(places))][None]
