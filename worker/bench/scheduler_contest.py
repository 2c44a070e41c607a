"""The contestants of scenario scheduler: one scheduler with a long queue, one with a short."""

import itertools
import random
import statistics
import time
from collections.abc import Iterator
from typing import NamedTuple

from headwater.schemas import GenerationJob, Priority

from ..prefix_cache import PrefixCache
from ..scheduler import Commit, Footprint, Scheduler, StepPlan
from ..scheduler import SchedulerSettings as Policy
from ..segment import CacheKind
from ..sequence import Sequence
from .claim_contest import measure_claims
from .environment import version
from .report import Figures
from .scenario import Contest, OpenQueue, Peer
from .scheduler import SchedulerSettings

_BYTES_PER_TOKEN = 1_000
_STEP_S = 0.05
_NUM_HEADS = 20
"""Different starts of prompts."""


class _Span(NamedTuple):
    """Stands for the keys and values of a token range."""

    num_tokens: int
    is_resumable: bool = True

    @property
    def nbytes(self) -> int:
        return _BYTES_PER_TOKEN * self.num_tokens

    def resumable_as(self, other: "_Span") -> "_Span":  # noqa: ARG002 - needs nothing of it
        return self

    def split(self, position: int) -> tuple["_Span", "_Span"]:
        return _Span(position), _Span(self.num_tokens - position)


def prepare(settings: SchedulerSettings, open_queue: OpenQueue) -> Contest:
    """Name the contestants; every run starts from an empty scheduler and an empty server."""

    def measure(num_known: int, depth: int) -> Figures:
        figures = _Run(settings).measure(num_known)
        if settings.claims:
            figures |= measure_claims(open_queue, settings.claims, depth)
        return figures

    few = Peer(
        name=f"headwater, {settings.baseline} known",
        version=version("headwater") or "from source",
        measure=lambda: measure(settings.baseline, settings.baseline_depth),
    )
    return Contest(lambda: measure(settings.known, settings.depth), (few,), _ratio)


def _ratio(ours: Figures, peer: Figures) -> Figures:
    ratios = {"step_time": ours["step_p50_ms"] / peer["step_p50_ms"]}
    if "claim_p50_ms" in ours:
        ratios["claim_time"] = ours["claim_p50_ms"] / peer["claim_p50_ms"]
    return ratios


class _Run:
    """A worker's loop with an engine that computes nothing and samples token 0."""

    def __init__(self, settings: SchedulerSettings) -> None:
        self._settings = settings
        # Small enough for evictions: half for the rows, half for the cache.
        row_nbytes = _BYTES_PER_TOKEN * (settings.prompt_tokens + settings.new_tokens)
        policy = Policy(
            max_batch=settings.batch,
            max_bytes=2 * settings.batch * row_nbytes,
            footprint=Footprint(bytes_per_token=_BYTES_PER_TOKEN),
        )
        self._cache: PrefixCache[_Span] = PrefixCache(CacheKind.SEGMENTS)
        self._scheduler = Scheduler(self._cache, policy)
        self._sequences = _sequences(settings)
        self._unread: list[Sequence] = []

    def measure(self, num_known: int) -> Figures:
        """Plan the steps with so many sequences known all the time."""
        for sequence in itertools.islice(self._sequences, num_known):
            self._scheduler.add(sequence, 0.0)
        seconds = []
        for step in range(self._settings.steps):
            now = step * _STEP_S
            started = time.perf_counter()
            plan = self._scheduler.schedule(now, self._save)
            seconds.append(time.perf_counter() - started)
            self._compute(plan)
            self._replace_ended(now)
            self._unread = [each for each in _rows(plan) if each.num_unread_tokens]
        return {
            "step_p50_ms": statistics.median(seconds) * 1e3,
            "step_p99_ms": statistics.quantiles(seconds, n=100)[-1] * 1e3,
            "prompt_tokens_reused": float(self._cache.statistics.num_reused_tokens),
        }

    def _compute(self, plan: StepPlan[_Span]) -> None:
        for commit in plan.early_commits:
            self._save(commit)
        for sequence, num_tokens in plan.prefill:
            _advance(sequence, num_tokens)
        for sequence in plan.decode:
            _advance(sequence, 1)
        for commit in plan.commits:
            self._scheduler.commit(commit, _Span(commit.end - commit.start))
        self._scheduler.observe(_STEP_S, plan.num_prefill_tokens, len(plan.decode))

    def _save(self, commit: Commit) -> None:
        self._scheduler.commit(commit, _Span(commit.end - commit.start))

    def _replace_ended(self, now: float) -> None:
        """Read the previous step's tokens; for who ends, another sequence arrives."""
        for sequence in self._unread:
            sequence.num_unread_tokens -= 1
            if sequence.is_finished:
                continue
            sequence.output_token_ids.append(0)
            if len(sequence.output_token_ids) == sequence.job.max_tokens:
                self._scheduler.finish(sequence)
                self._scheduler.add(next(self._sequences), now)


def _rows(plan: StepPlan[_Span]) -> list[Sequence]:
    return [*(scheduled.sequence for scheduled in plan.prefill), *plan.decode]


def _advance(sequence: Sequence, num_tokens: int) -> None:
    sequence.num_computed_tokens += num_tokens
    if sequence.num_pending_tokens == 0:
        sequence.num_unread_tokens += 1


def _sequences(settings: SchedulerSettings) -> Iterator[Sequence]:
    """Yield jobs of all classes, whose prompts start in one of a few ways."""
    rng = random.Random(0)  # noqa: S311 - the same work in every run
    half = settings.prompt_tokens // 2

    def tokens() -> tuple[int, ...]:
        return tuple(rng.choices(range(10_000), k=half))

    heads = [tokens() for _ in range(_NUM_HEADS)]
    for index in itertools.count():
        job = GenerationJob(
            job_id=f"job-{index}",
            model="none",
            prompt_token_ids=rng.choice(heads) + tokens(),
            max_tokens=settings.new_tokens,
            priority=rng.choice(list(Priority)),
        )
        yield Sequence(job)
