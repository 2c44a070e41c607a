"""PromptReader: scores, embeddings and prompt logprobs, read off the forwards of prompts."""

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Final, NamedTuple, Protocol

import mlx.core as mx
import numpy as np
from headwater.schemas import Pooling

from ..sequence import PromptReading, Reading, Readout, ScheduledSequence, Sequence
from .logprobs import PositionArrays
from .runner import ModelRunner

_MAX_POSITIONS: Final = 512
_MAX_LOGITS_NBYTES: Final = 64 * 2**20
"""Logits of a forward that are read: with a large vocabulary each takes half a megabyte."""
_NUM_COPIES: Final = 3
"""Of those logits, while they are read: the model's, in float32, their exponentials."""


def max_positions(vocabulary_size: int) -> int:
    """Return how many positions of one forward are read at most."""
    return max(1, min(_MAX_POSITIONS, _MAX_LOGITS_NBYTES // (4 * vocabulary_size)))


def reading_nbytes(vocabulary_size: int) -> int:
    """Return what reading logits takes in memory beside a forward's own activations."""
    return _NUM_COPIES * 4 * vocabulary_size * max_positions(vocabulary_size)


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


class Pending(Protocol):
    """What was read of a sequence; on the device until read() asks for it."""

    sequence: Sequence

    def read(self) -> Reading | PromptReading:
        """Wait for it."""
        ...


class PendingPrompt:
    """Logprobs of a piece of a prompt."""

    def __init__(self, sequence: Sequence, first_position: int, positions: PositionArrays) -> None:
        self.sequence = sequence
        self._first_position = first_position
        self._positions = positions

    def read(self) -> PromptReading:
        """Wait for them."""
        logprobs = self._positions.read()
        # The logarithm of nothing is minus infinity and sound; what is no number is not.
        is_finite = not any(each.logprob != each.logprob for each in logprobs)
        return PromptReading(self.sequence, self._first_position, logprobs, is_finite)


class PendingReading:
    """All that was wanted of a sequence that ends with its prompt."""

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


class PromptsRead(NamedTuple):
    """What came of the next chunks of prompts with a readout."""

    pending: list[Pending]
    closing: list[tuple[Sequence, mx.array]]
    """The sequences whose next token is due, with the logits that it comes of, (vocabulary,)."""


class PromptReader:
    """Computes the prompts of sequences with a readout, and keeps what it reads there.

    Where the prompt is all, what was read is kept until its end; a sequence that loses its row is
    read anew from where its next row starts, which is never behind the first position that is
    wanted. Prompt logprobs are told chunk by chunk instead.
    """

    def __init__(self, runner: ModelRunner, vocabulary_size: int) -> None:
        self._runner = runner
        self._max_positions = max_positions(vocabulary_size)
        self._notes: dict[Sequence, _Notes] = {}

    def attach(self, sequence: Sequence) -> None:
        """Begin to read a sequence that has just got a row."""
        if sequence.ends_with_prompt:
            self._notes[sequence] = _Notes()

    def detach(self, sequence: Sequence) -> None:
        """Forget a sequence; unknown ones are ignored."""
        self._notes.pop(sequence, None)

    def compute(self, scheduled: Iterable[ScheduledSequence]) -> PromptsRead:
        """Compute the next chunks."""
        spans = [(row, row.num_computed_tokens, num_tokens) for row, num_tokens in scheduled]
        read = self.compute_spans(spans)
        for row, start, num_tokens in spans:
            if row in self._notes and start + num_tokens == row.num_tokens:
                read.pending.append(PendingReading(row, self._notes[row]))
        return read

    def compute_spans(self, spans: Seq[tuple[Sequence, int, int]]) -> PromptsRead:
        """Compute (row, first token, number of tokens) each, in forwards of a bounded size."""
        read = PromptsRead([], [])
        num_scored = sum(bool(_readout(row).targets) for row, _, _ in spans)
        longest = max((num_tokens for _, _, num_tokens in spans), default=0)
        step = max(1, self._max_positions // num_scored) if num_scored else longest
        for offset in range(0, longest, step or 1):
            piece = _Piece(self._notes)
            for row, start, num_tokens in spans:
                if offset < num_tokens:
                    piece.starts[row] = start + offset
                    piece.ends[row] = start + min(num_tokens, offset + step)
            rows = list(piece.starts)
            chunks = [row.tokens(piece.starts[row], piece.ends[row]) for row in rows]
            logits = self._runner.prefill(rows, chunks, piece)
            for row, after in zip(rows, logits, strict=True):
                if _readout(row).precedes_generation and piece.ends[row] == row.num_tokens:
                    read.closing.append((row, after))
            read.pending.extend(piece.prompts)
            # Started piece by piece: the logits of one are gone before the next one's come.
            mx.async_eval([*piece.arrays, *self._runner.state(rows)])  # type: ignore[no-untyped-call]
        return read


@dataclass(slots=True)
class _Piece:
    """Reads one forward."""

    notes: dict[Sequence, _Notes]
    starts: dict[Sequence, int] = field(default_factory=dict)
    ends: dict[Sequence, int] = field(default_factory=dict)
    prompts: list[PendingPrompt] = field(default_factory=list)
    read: list[mx.array] = field(default_factory=list)

    @property
    def arrays(self) -> list[mx.array]:
        """What the device has to compute."""
        notes = (self.notes[row] for row in self.starts if row in self.notes)
        return [*self.read, *(array for each in notes for array in each.arrays)]

    def positions(self, sequence: Sequence) -> Seq[int]:
        """Return the positions that precede a target."""
        readout, start = _readout(sequence), self.starts[sequence]
        last = readout.first_position + len(readout.targets)
        end = min(self.ends[sequence], last) - start
        return range(max(0, readout.first_position - start), end)

    def take_states(self, sequence: Sequence, states: mx.array) -> None:
        """Pool what the chunk adds."""
        pooling = _readout(sequence).pooling
        if pooling is None:
            return
        notes = self.notes[sequence]
        if pooling is Pooling.MEAN:
            added = mx.sum(states.astype(mx.float32), axis=0)
            notes.states = added if notes.states is None else notes.states + added
        else:
            notes.states = states[-1].astype(mx.float32)

    def take_logits(self, sequence: Sequence, logits: mx.array) -> None:
        """Note how likely the targets are."""
        readout = _readout(sequence)
        first = max(readout.first_position, self.starts[sequence])
        start = first - readout.first_position
        targets = mx.array(readout.targets[start : start + logits.shape[0]])
        if readout.num_top is not None:
            positions = PositionArrays.of(logits, targets, readout.num_top)
            self.prompts.append(PendingPrompt(sequence, first, positions))
            self.read += positions.arrays
            return
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
