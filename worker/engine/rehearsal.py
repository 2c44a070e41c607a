"""A rehearsal: one short run that shows a runner all that can happen to rows.

    first group    root ─┬─ nested ─┬─ leader's own
                         │          └─ taker's own
                         └─ taker's own
    second group   other ─── taker's own
    no group       a row of its own

Prefixes are taken from leaders in the middle of their prompts, rows of all lengths compute
together, one forks from a row that decodes, rows leave and others go on without them.
"""

import random
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import NamedTuple

import mlx.core as mx
from headwater.schemas import GenerationJob
from mlx.nn.layers.base import Module

from ..sequence import Sequence
from .row_runner import RowRunner
from .runner import DeviceSegment, ModelRunner, Segment
from .states import StateSegment

_NUM_DECODED = 6
"""Tokens that a row decodes at most."""


class Lengths(NamedTuple):
    """Tokens of the parts that rows are made of."""

    root: int
    nested: int
    other: int | None
    """None leaves the second group out: four rows are left, and the fork."""
    own: tuple[int, ...]
    """Of the rows, ragged; as many as there can be rows."""


SMALL = Lengths(root=11, nested=5, other=13, own=(9, 3, 17, 1, 6, 12))
"""Longer than a window of 8 tokens, and shorter, wherever a row may cross one."""


def rehearse(runner: ModelRunner, lengths: Lengths, vocabulary_size: int) -> mx.array:
    """Run it; return all logits seen, (positions, vocabulary), not evaluated.

    All tokens are given, so a difference at one step does not change the steps behind it.
    """
    stage = _Stage(runner, random.Random(0), vocabulary_size)  # noqa: S311  # not secrets
    rows = _open(stage, lengths)
    stage.prefill(rows, [stage.num_left(row) - _NUM_DECODED for row in rows])
    stage.decode(rows[::-1])
    fork = stage.fork(rows[1])
    stage.decode([*rows[2:], *rows[:2]])
    stage.prefill_and_decode([fork], [2], rows[2:])
    runner.detach(rows[0])
    stage.decode([fork, *rows[1:]])
    stage.decode([rows[2], fork])
    stage.decode([rows[-1], fork, rows[1]])
    for row in (*rows, fork):
        runner.detach(row)
    return mx.concatenate(stage.logits)


def rehearse_alone(model: Module, lengths: Lengths, vocabulary_size: int) -> mx.array:
    """Return what rehearse() has to give: every row alone, and its prefix computed anew."""
    return rehearse(_Alone(model), lengths, vocabulary_size)


class _Alone(RowRunner):
    """Takes no prefix from anybody: computes it."""

    def attach(self, sequence: Sequence, prefix: Seq[Segment]) -> None:
        super().attach(sequence, ())
        num_tokens = sum(segment.num_tokens for segment in prefix)
        if num_tokens:
            self.prefill([sequence], [sequence.tokens(0, num_tokens)])

    def extract(self, sequence: Sequence, start: int, end: int) -> DeviceSegment:  # noqa: ARG002
        return StateSegment(end - start, {}, None)


@dataclass
class _Stage:
    """Keeps the rows' texts and how far each has come."""

    runner: ModelRunner
    rng: random.Random
    vocabulary_size: int
    logits: list[mx.array] = field(default_factory=list)
    at: dict[Sequence, int] = field(default_factory=dict)
    prefix_of: dict[Sequence, list[DeviceSegment]] = field(default_factory=dict)

    def draw(self, num_tokens: int) -> list[int]:
        return [self.rng.randrange(self.vocabulary_size) for _ in range(num_tokens)]

    def start(self, text: Seq[int], prefix: Seq[DeviceSegment] = ()) -> Sequence:
        """Give a row to *text* and what it will decode."""
        job = GenerationJob(
            job_id="parity",
            model="parity",
            prompt_token_ids=(*text, *self.draw(_NUM_DECODED)),
            max_tokens=1,
        )
        row = Sequence(job)
        self.runner.attach(row, prefix)
        self.at[row] = sum(segment.num_tokens for segment in prefix)
        self.prefix_of[row] = list(prefix)
        return row

    def num_left(self, row: Sequence) -> int:
        return row.num_prompt_tokens - self.at[row]

    def prefill(self, rows: Seq[Sequence], lengths: Seq[int]) -> None:
        chunks = [self._take(row, num) for row, num in zip(rows, lengths, strict=True)]
        self.logits.append(self.runner.prefill(rows, chunks))

    def decode(self, rows: Seq[Sequence]) -> None:
        tokens = mx.array([self._take(row, 1)[0] for row in rows])
        self.logits.append(self.runner.decode(rows, tokens))

    def prefill_and_decode(
        self, rows: Seq[Sequence], lengths: Seq[int], decoding: Seq[Sequence]
    ) -> None:
        chunks = [self._take(row, num) for row, num in zip(rows, lengths, strict=True)]
        tokens = mx.array([self._take(row, 1)[0] for row in decoding])
        self.logits.append(self.runner.prefill_and_decode(rows, chunks, decoding, tokens))

    def lead(self, row: Sequence, num_tokens: int) -> list[DeviceSegment]:
        """Compute the next tokens of a row and let others have all that it has computed."""
        start = self.at[row]
        self.prefill([row], [num_tokens])
        return self._store(row, start)

    def fork(self, row: Sequence) -> Sequence:
        """Start a row that continues what *row* has computed so far."""
        start = sum(segment.num_tokens for segment in self.prefix_of[row])
        prefix = self._store(row, start)
        return self.start([*row.tokens(0, self.at[row]), *self.draw(2)], prefix)

    def _store(self, row: Sequence, start: int) -> list[DeviceSegment]:
        """Do as the prefix cache does with tokens from *start* on."""
        prefix = self.prefix_of[row]
        prefix.append(self.runner.extract(row, start, self.at[row]))
        self.runner.rebase(row, prefix)
        return list(prefix)

    def _take(self, row: Sequence, num_tokens: int) -> list[int]:
        start = self.at[row]
        self.at[row] = start + num_tokens
        return row.tokens(start, start + num_tokens)


def _open(stage: _Stage, lengths: Lengths) -> list[Sequence]:
    """Compute the prefixes; return all rows, each at the end of its own."""
    root, nested = stage.draw(lengths.root), stage.draw(lengths.nested)
    own = [stage.draw(num_tokens) for num_tokens in lengths.own]
    leader = stage.start([*root, *nested, *own[0]])
    first = stage.lead(leader, lengths.root)
    second = stage.lead(leader, lengths.nested)
    rows = [
        leader,
        stage.start([*root, *nested, *own[1]], second),
        stage.start([*root, *own[2]], first),
        stage.start(own[3]),
    ]
    if lengths.other is not None:
        other = stage.draw(lengths.other)
        rows.append(stage.start([*other, *own[4]]))
        rows.append(stage.start([*other, *own[5]], stage.lead(rows[-1], lengths.other)))
    return rows
