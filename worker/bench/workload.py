"""Jobs to measure with, the same in every run and for both sides, and when they arrive."""

import heapq
import itertools
import random
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from typing import TypeAlias

from headwater.schemas import GenerationJob, SamplingParams

ALIAS = "bench"

FollowUp: TypeAlias = Callable[[GenerationJob, list[int]], GenerationJob | None]
"""Makes the job that a job's end (with its output tokens) brings, if it brings one."""


class Prompts:
    """Random tokens; the same ones for the same seed."""

    def __init__(self, vocab_size: int, seed: int = 0) -> None:
        self._rng = random.Random(seed)  # noqa: S311 - the same work in every run
        self._vocab_size = vocab_size

    def tokens(self, num_tokens: int) -> tuple[int, ...]:
        """Return *num_tokens* tokens that nobody had before."""
        return tuple(self._rng.randrange(self._vocab_size) for _ in range(num_tokens))

    def length(self, shortest: int, longest: int) -> int:
        """Return a length between both, ends included."""
        return self._rng.randint(shortest, longest)


def make_job(
    job_id: str, prompt: Seq[int], num_new_tokens: int, sampling: SamplingParams | None = None
) -> GenerationJob:
    """Return a job, greedy without *sampling*, that generates exactly *num_new_tokens*."""
    return GenerationJob(
        job_id=job_id,
        model=ALIAS,
        prompt_token_ids=tuple(prompt),
        max_tokens=num_new_tokens,
        ignore_eos=True,
        sampling=sampling or SamplingParams(),
    )


class Arrivals:
    """Jobs on their way to one side. Seconds count from that side's start."""

    def __init__(
        self, jobs: Iterable[tuple[float, GenerationJob]], follow_up: FollowUp | None = None
    ) -> None:
        self._order = itertools.count()
        self._coming = [(at, next(self._order), job) for at, job in jobs]
        heapq.heapify(self._coming)
        self._follow_up = follow_up
        self.jobs: dict[str, GenerationJob] = {}
        """Those that have arrived."""
        self.arrived_s: dict[str, float] = {}
        self.num_open = 0
        """Jobs that have arrived and not ended."""

    @property
    def is_done(self) -> bool:
        """Whether every job has ended and none will come."""
        return not self._coming and not self.num_open

    @property
    def next_s(self) -> float:
        """When the next job arrives, of those known to come."""
        return self._coming[0][0]

    def take(self, now: float) -> list[GenerationJob]:
        """Return the jobs that have arrived since the last call."""
        taken = []
        while self._coming and self._coming[0][0] <= now:
            at, _, job = heapq.heappop(self._coming)
            self.arrived_s[job.job_id] = at
            self.jobs[job.job_id] = job
            self.num_open += 1
            taken.append(job)
        return taken

    def ended(self, job_id: str, token_ids: list[int], now: float) -> None:
        """Note a job's end; it may bring another job at once."""
        self.num_open -= 1
        if self._follow_up is not None:
            following = self._follow_up(self.jobs[job_id], token_ids)
            if following is not None:
                heapq.heappush(self._coming, (now, next(self._order), following))


def num_unique_tokens(prompts: Iterable[Seq[int]]) -> int:
    """Return the nodes of the trie of *prompts*: tokens that must be computed at least once."""
    total = 0
    last: tuple[int, ...] = ()
    for prompt in sorted(map(tuple, prompts)):
        shared = itertools.takewhile(
            lambda pair: pair[0] == pair[1], zip(last, prompt, strict=False)
        )
        total += len(prompt) - sum(1 for _ in shared)
        last = prompt
    return total
