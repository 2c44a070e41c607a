"""An engine without a model that checks what it is told, and a worker's loop around it."""

import itertools
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from typing import Any, Self

import pytest
from headwater.schemas import GenerationJob, Priority
from headwater.worker.prefix_cache import PrefixCache
from headwater.worker.scheduler import (
    Commit,
    Footprint,
    Scheduler,
    SchedulerSettings,
    StepPlan,
)
from headwater.worker.segment import CacheKind
from headwater.worker.sequence import Sequence

BYTES_PER_TOKEN = 10


@dataclass(frozen=True)
class TokenSegment:
    """Stands for keys and values: the tokens that they were computed for."""

    tokens: tuple[int, ...]
    kind: CacheKind = CacheKind.SEGMENTS
    is_resumable: bool = True

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def nbytes(self) -> int:
        return BYTES_PER_TOKEN * len(self.tokens)

    def split(self, position: int) -> tuple[Self, Self]:
        assert 0 < position < len(self.tokens)
        first = replace(
            self,
            tokens=self.tokens[:position],
            is_resumable=self.kind is CacheKind.SEGMENTS,
        )
        return first, replace(self, tokens=self.tokens[position:])

    def resumable_as(self, other: Self) -> Self:
        assert other.tokens[-len(self.tokens) :] == self.tokens[-len(other.tokens) :]
        return replace(self, is_resumable=other.is_resumable)


class FakeEngine:
    """Rows are lists of tokens; every instruction is checked against what the row has."""

    def __init__(self, kind: CacheKind, footprint: Footprint) -> None:
        self.kind = kind
        self.shares_prefix = footprint.shares_prefix
        self.allocation = footprint.allocation
        self.rows: dict[Sequence, list[int]] = {}
        self.prefixes: dict[Sequence, list[TokenSegment]] = {}
        """What rows would share, were they told to."""
        self.num_prompt_tokens = 0
        """Prompt tokens computed so far."""
        self.num_free_tokens = 0
        """Room for tokens that rows which have gone left behind."""
        self.num_extra_tokens = 0
        """Held for whatever else."""

    @property
    def nbytes(self) -> int:
        held = sum(self.allocation.held_tokens(self.num_own_tokens(row)) for row in self.rows)
        return BYTES_PER_TOKEN * (held + self.num_free_tokens + self.num_extra_tokens)

    def num_own_tokens(self, sequence: Sequence) -> int:
        """Tokens of a row that it holds itself."""
        return len(self.rows[sequence]) - self.num_shared_tokens(sequence)

    def num_shared_tokens(self, sequence: Sequence) -> int:
        """Tokens of a row that it does not hold itself."""
        return sum(segment.num_tokens for segment in self.prefixes.get(sequence, ()))

    def attach(self, sequence: Sequence, prefix: Seq[TokenSegment]) -> None:
        assert sequence not in self.rows
        assert all(segment.is_resumable for segment in prefix[-1:])
        row = [token for segment in prefix for token in segment.tokens]
        assert row == sequence.tokens(0, sequence.num_computed_tokens)
        assert len(row) < sequence.num_tokens
        self.rows[sequence] = row
        if self.shares_prefix:
            self.prefixes[sequence] = list(prefix)

    def detach(self, sequence: Sequence) -> None:
        if sequence in self.rows:
            self.num_free_tokens += self.num_own_tokens(sequence)
        self.prefixes.pop(sequence, None)
        self.rows.pop(sequence, None)

    def launch(self, plan: StepPlan[TokenSegment]) -> list[Sequence]:
        """Compute; return the sequences that sampled a token."""
        work = [*plan.prefill, *((sequence, 1) for sequence in plan.decode)]
        assert len({sequence for sequence, _ in work}) == len(work)
        sampled = []
        for sequence, num_tokens in work:
            assert 1 <= num_tokens <= sequence.num_pending_tokens
            assert sequence.num_remaining_tokens > 0
            start = sequence.num_computed_tokens
            self.num_prompt_tokens += max(0, min(num_tokens, sequence.num_prompt_tokens - start))
            sequence.num_computed_tokens = start + num_tokens
            end = min(sequence.num_computed_tokens, sequence.num_known_tokens)
            self.rows[sequence] += sequence.tokens(min(start, end), end)
            if sequence.num_pending_tokens == 0:
                sequence.num_unread_tokens += 1
                sampled.append(sequence)
            self.num_free_tokens = max(0, self.num_free_tokens - num_tokens)
        num_own = sum(map(self.num_own_tokens, self.rows))
        spare = max(self.allocation.spare_tokens, int(self.allocation.spare_share * num_own))
        self.num_free_tokens = min(self.num_free_tokens, spare if self.rows else 0)
        return sampled

    def extract(self, sequence: Sequence, start: int, end: int) -> TokenSegment:
        row = self.rows[sequence]
        assert 0 <= start < end <= len(row)
        if self.kind is CacheKind.SNAPSHOTS:
            assert end == sequence.num_computed_tokens == len(row)
        return TokenSegment(tuple(row[start:end]), self.kind)

    def rebase(self, sequence: Sequence, prefix: Seq[TokenSegment]) -> None:
        held = [token for segment in prefix for token in segment.tokens]
        assert held == self.rows[sequence][: len(held)]
        assert self.shares_prefix
        self.prefixes[sequence] = list(prefix)


@dataclass
class Worker:
    """The engine thread's loop, with the pipelining of the real one."""

    kind: CacheKind = CacheKind.SEGMENTS
    settings: SchedulerSettings = field(default_factory=SchedulerSettings)
    step_s: float = 0.01
    token_s: float = 0.0

    def __post_init__(self) -> None:
        self.cache: PrefixCache[TokenSegment] = PrefixCache(self.kind)
        self.scheduler: Scheduler[TokenSegment] = Scheduler(self.cache, self.settings, "model")
        self.engine = FakeEngine(self.kind, self.settings.footprint)
        self.now = 0.0
        self.unread: list[Sequence] = []
        self.finished: list[Sequence] = []
        self.started: list[Sequence] = []
        """In the order of their first admission."""
        self.num_preempted = 0
        self.plan: StepPlan[TokenSegment] = StepPlan()
        self.peak_nbytes = 0
        self._has_started: set[Sequence] = set()

    def add(self, *sequences: Sequence) -> None:
        for sequence in sequences:
            self.scheduler.add(sequence, self.now)

    def step(self) -> None:
        plan = self.plan = self.scheduler.schedule(self.now, self._save, self.engine.nbytes)
        for commit in plan.early_commits:
            self._save(commit)
        for sequence in plan.detach:
            self.engine.detach(sequence)
        for row in plan.admit:
            self.engine.attach(row.sequence, row.prefix)
            if row.sequence not in self._has_started:
                self._has_started.add(row.sequence)
                self.started.append(row.sequence)
        for row in plan.rebase:
            self.engine.rebase(row.sequence, row.prefix)
        sampled = self.engine.launch(plan)
        for commit in plan.commits:
            prefix = self.scheduler.commit(commit, self.engine.extract(*commit))
            if prefix:
                self.engine.rebase(commit.sequence, prefix)
        self.num_preempted += plan.num_preempted
        self.peak_nbytes = max(self.peak_nbytes, self.engine.nbytes + self.cache.nbytes)
        seconds = self.step_s + self.token_s * plan.num_prefill_tokens
        self.now += seconds
        self.scheduler.observe(seconds, plan.num_prefill_tokens, len(plan.decode))
        self._read()
        self.unread = sampled

    def run(self, max_steps: int = 100_000) -> None:
        """Step until nothing is left to do."""
        for _ in range(max_steps):
            if self.scheduler.is_idle and not self.unread:
                return
            self.step()
        raise AssertionError(f"{self.scheduler.num_waiting} still wait")

    def check_baseline(self) -> None:
        """Nothing is left of finished work but what the cache may keep."""
        self.cache.check_integrity()
        assert self.scheduler.is_idle
        assert self.engine.rows == {}
        assert self.scheduler.num_waiting == self.scheduler.num_running == 0
        assert self.cache.pinned_nbytes == 0
        self.cache.evict(10**12)
        assert self.cache.nbytes == self.cache.num_nodes == 0

    def _save(self, commit: Commit) -> None:
        self.scheduler.commit(commit, self.engine.extract(*commit))

    def _read(self) -> None:
        for sequence in self.unread:
            sequence.num_unread_tokens -= 1
            if sequence.is_finished:
                continue
            index = len(sequence.output_token_ids)
            sequence.output_token_ids.append(output_token(sequence, index))
            row = self.engine.rows.get(sequence)
            if row is not None and len(row) < sequence.num_computed_tokens:
                row.append(sequence.output_token_ids[-1])
            if index + 1 == sequence.job.max_tokens:
                self.scheduler.finish(sequence)
                self.finished.append(sequence)


def output_token(sequence: Sequence, index: int) -> int:
    """Return the token that a sequence always samples at *index*."""
    return 1_000 + hash((sequence.num_prompt_tokens, index)) % 1_000


@pytest.fixture
def make_worker() -> Callable[..., Worker]:
    return Worker


@pytest.fixture
def make_sequence() -> Callable[..., Sequence]:
    counter = itertools.count()

    def make(
        prompt: Iterable[int], max_tokens: int = 4, priority: str = "normal", **fields: Any
    ) -> Sequence:
        runs_alone = fields.pop("runs_alone", False)
        job = GenerationJob(
            job_id=f"job-{next(counter)}",
            model="m",
            prompt_token_ids=tuple(prompt),
            max_tokens=max_tokens,
            priority=Priority(priority),
            **fields,
        )
        return Sequence(job, runs_alone=runs_alone)

    return make
