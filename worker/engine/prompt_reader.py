"""PromptReader: scores and embeddings, read off the forwards of prompts."""

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Final

import mlx.core as mx
import numpy as np
from headwater.schemas import Pooling

from ..sequence import Reading, Readout, ScheduledSequence, Sequence
from .runner import ModelRunner

_MAX_POSITIONS: Final = 512
"""Logits of a forward that are read: with a large vocabulary each takes half a megabyte."""


@dataclass(slots=True)
class _Notes:
    """What was read of one sequence so far."""

    logprobs: list[mx.array] = field(default_factory=list)
    are_likeliest: list[mx.array] = field(default_factory=list)
    states: mx.array | None = None
    """The last token's, or the sum over all so far, (size,) float32."""

    @property
    def arrays(self) -> list[mx.array]:
        states = [] if self.states is None else [self.states]
        return [*self.logprobs, *self.are_likeliest, *states]


class PendingReading:
    """A reading that is on the device until read() asks for it."""

    def __init__(self, sequence: Sequence, notes: _Notes) -> None:
        self.sequence = sequence
        self._notes = notes

    def read(self) -> Reading:
        """Wait for it."""
        notes = self._notes
        if notes.states is not None:
            vector = np.array(_pooled(self.sequence, notes.states), dtype="<f4")
            return Reading(self.sequence, vector=vector.tobytes(), is_finite=_is_finite(vector))
        logprobs = np.array(mx.concatenate(notes.logprobs), dtype=np.float64)
        is_greedy = bool(np.array(mx.concatenate(notes.are_likeliest)).all())
        return Reading(
            self.sequence, tuple(logprobs.tolist()), is_greedy, is_finite=_is_finite(logprobs)
        )


class PromptReader:
    """Computes the prompts of sequences with a readout, and keeps what it reads there.

    A sequence that loses its row is read anew from where its next row starts, which is never
    behind the first position that is wanted.
    """

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self._notes: dict[Sequence, _Notes] = {}

    def attach(self, sequence: Sequence) -> None:
        """Begin to read a sequence that has just got a row."""
        if sequence.readout is not None:
            self._notes[sequence] = _Notes()

    def detach(self, sequence: Sequence) -> None:
        """Forget a sequence; unknown ones are ignored."""
        self._notes.pop(sequence, None)

    def compute(self, scheduled: Iterable[ScheduledSequence]) -> list[PendingReading]:
        """Compute the next chunks; return the readings of the prompts that they complete."""
        spans = [(row, row.num_computed_tokens, num_tokens) for row, num_tokens in scheduled]
        self.compute_spans(spans)
        ends = ((row, start + num_tokens) for row, start, num_tokens in spans)
        return [PendingReading(row, self._notes[row]) for row, end in ends if end == row.num_tokens]

    def compute_spans(self, spans: Seq[tuple[Sequence, int, int]]) -> None:
        """Compute (row, first token, number of tokens) each, in forwards of a bounded size."""
        num_scored = sum(bool(_readout(row).targets) for row, _, _ in spans)
        longest = max((num_tokens for _, _, num_tokens in spans), default=0)
        step = max(1, _MAX_POSITIONS // num_scored) if num_scored else longest
        for offset in range(0, longest, step or 1):
            piece = _Piece(self._notes)
            for row, start, num_tokens in spans:
                if offset < num_tokens:
                    piece.starts[row] = start + offset
                    piece.ends[row] = start + min(num_tokens, offset + step)
            rows = list(piece.starts)
            chunks = [row.tokens(piece.starts[row], piece.ends[row]) for row in rows]
            self._runner.prefill(rows, chunks, piece)
            read = [array for row in rows for array in self._notes[row].arrays]
            # Started piece by piece: the logits of one are gone before the next one's come.
            mx.async_eval([*read, *self._runner.state(rows)])  # type: ignore[no-untyped-call]


@dataclass(slots=True)
class _Piece:
    """Reads one forward."""

    notes: dict[Sequence, _Notes]
    starts: dict[Sequence, int] = field(default_factory=dict)
    ends: dict[Sequence, int] = field(default_factory=dict)

    def positions(self, sequence: Sequence) -> Seq[int]:
        """Return the positions that precede a target."""
        readout, start = _readout(sequence), self.starts[sequence]
        if not readout.targets:
            return ()
        return range(max(0, readout.first_position - start), self.ends[sequence] - start)

    def take_states(self, sequence: Sequence, states: mx.array) -> None:
        """Pool what the chunk adds."""
        notes, pooling = self.notes[sequence], _readout(sequence).pooling
        if pooling is Pooling.MEAN:
            added = mx.sum(states.astype(mx.float32), axis=0)
            notes.states = added if notes.states is None else notes.states + added
        elif pooling is Pooling.LAST:
            notes.states = states[-1].astype(mx.float32)

    def take_logits(self, sequence: Sequence, logits: mx.array) -> None:
        """Note how likely the targets are."""
        readout = _readout(sequence)
        end = self.ends[sequence] - readout.first_position
        targets = mx.array(readout.targets[end - logits.shape[0] : end])
        logits = logits.astype(mx.float32)
        chosen = mx.take_along_axis(logits, targets[:, None], axis=-1)[:, 0]
        notes = self.notes[sequence]
        notes.logprobs.append(chosen - mx.logsumexp(logits, axis=-1))
        notes.are_likeliest.append(mx.argmax(logits, axis=-1) == targets)


def _readout(sequence: Sequence) -> Readout:
    assert sequence.readout is not None
    return sequence.readout


def _pooled(sequence: Sequence, states: mx.array) -> mx.array:
    if _readout(sequence).pooling is Pooling.MEAN:
        states = states / sequence.num_prompt_tokens
    if sequence.job.normalize:
        # Zero has no direction; it stays what it is.
        states = states / mx.maximum(mx.linalg.norm(states), 1e-12)
    return states


def _is_finite(values: np.ndarray) -> bool:
    return bool(np.isfinite(values).all())
