"""Random workloads: ragged prompts that share prefixes, chunks, joins, leaves, cancellations."""

import random
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any

from headwater.schemas import GenerationJob, SamplingParams
from headwater.worker.engine.engine import Engine
from headwater.worker.engine.runner import CacheKind, ModelRunner
from headwater.worker.engine.sampler import Sampler
from headwater.worker.sequence import ScheduledSequence, Sequence, SequenceStatus

from tests.tiny_models import VOCABULARY_SIZE

MAX_ROWS = 6


def sequence(prompt: Seq[int], max_tokens: int = 8, **fields: Any) -> Sequence:
    """A greedy sequence without an end token, unless *fields* of the job say otherwise."""
    fields.setdefault("sampling", SamplingParams())
    job = GenerationJob(
        job_id="job", model="tiny", prompt_token_ids=tuple(prompt), max_tokens=max_tokens, **fields
    )
    return Sequence(job)


def random_prompts(rng: random.Random, num_prompts: int) -> list[list[int]]:
    """Prompts of 1 to 40 tokens, about half of them the continuation of an earlier one."""
    prompts: list[list[int]] = []
    for _ in range(num_prompts):
        stem = rng.choice(prompts) if prompts and rng.random() < 0.5 else []
        own = [rng.randrange(VOCABULARY_SIZE) for _ in range(rng.randrange(1, 24))]
        prompts.append([*stem[: rng.randrange(1, 24)], *own])
    return prompts


@dataclass
class Workload:
    """Drives an engine as a scheduler would, by dice."""

    runner: ModelRunner
    rng: random.Random
    pending: list[Sequence]
    engine: Engine = field(init=False)
    running: list[Sequence] = field(default_factory=list)
    ended: list[Sequence] = field(default_factory=list)
    stored: list[tuple[list[int], list[Any]]] = field(default_factory=list)
    """Prefixes: their tokens, and adjacent segments or one state."""

    def __post_init__(self) -> None:
        self.engine = Engine(self.runner, Sampler(VOCABULARY_SIZE, ()))

    def run(self) -> list[Sequence]:
        """Step until every sequence has ended; return them all."""
        in_flight = None
        while self.pending or self.running or in_flight:
            while self.pending and len(self.running) < MAX_ROWS and self.rng.random() < 0.5:
                self._attach(self.pending.pop())
            previous, in_flight = in_flight, self._launch()
            if previous is not None:
                self._read(previous)
        return self.ended

    def _attach(self, sequence: Sequence) -> None:
        prompt = list(sequence.job.prompt_token_ids)
        usable = [
            (tokens, segments)
            for tokens, segments in self.stored
            if prompt[: len(tokens)] == tokens and len(tokens) < len(prompt)
        ]
        prefix = max(usable, key=lambda entry: len(entry[0]))[1] if usable else []
        self.engine.attach(sequence, prefix)
        sequence.status = SequenceStatus.RUNNING
        self.running.append(sequence)

    def _launch(self):
        rows = [row for row in self.running if row.num_remaining_tokens > 0]
        rows = [row for row in rows if self.rng.random() < 0.9]
        self.rng.shuffle(rows)
        decode = [row for row in rows if row.num_pending_tokens == 1 and row.num_output_tokens]
        prefill = [
            ScheduledSequence(row, self.rng.randint(1, row.num_pending_tokens))
            for row in rows
            if row not in decode
        ]
        if not rows:
            return None
        step = self.engine.launch(prefill, decode)
        for row, _ in prefill:
            if self.rng.random() < 0.5:
                self._store(row)
        return step

    def _store(self, row: Sequence) -> None:
        end = row.num_computed_tokens
        tokens = row.tokens(0, end)
        if self.engine.cache_kind is CacheKind.SNAPSHOTS:
            self._store_state(row, tokens)
            return
        cut = self.rng.randint(1, end)
        parts = [self.engine.extract(row, 0, cut)]
        if cut < end:
            parts.append(self.engine.extract(row, cut, end))
        self.stored.append((tokens, parts))
        if cut > 1:
            head, _ = parts[0].split(cut // 2)
            self.stored.append((tokens[: cut // 2], [head]))

    def _store_state(self, row: Sequence, tokens: list[int]) -> None:
        """Store behind what is there already, as the prefix cache does."""
        known = [entry for entry in self.stored if tokens[: len(entry[0])] == entry[0]]
        before, segments = max(known, key=lambda entry: len(entry[0]), default=([], []))
        if len(before) < len(tokens):
            segment = self.engine.extract(row, len(before), len(tokens))
            self.stored.append((tokens, [*segments, segment]))

    def _read(self, step) -> None:
        result = step.read()
        assert not result.failed, result.failed
        for row in list(self.running):
            is_done = len(row.output_token_ids) == row.job.max_tokens
            if is_done or self.rng.random() < 0.02:
                row.status = SequenceStatus.FINISHED
                self.engine.detach(row)
                self.running.remove(row)
                self.ended.append(row)
