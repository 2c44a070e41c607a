"""Jobs to measure with, the same in every run, and a sink that notes when their tokens come."""

import random
import time
from collections.abc import Iterable
from collections.abc import Sequence as Seq

from headwater.schemas import DeltaPart, End, GenerationJob

ALIAS = "bench"


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


def job(job_id: str, prompt: Seq[int], num_new_tokens: int) -> GenerationJob:
    """Return a greedy job that generates exactly *num_new_tokens*."""
    return GenerationJob(
        job_id=job_id,
        model=ALIAS,
        prompt_token_ids=tuple(prompt),
        max_tokens=num_new_tokens,
        ignore_eos=True,
    )


class RecordingSink:
    """Notes every token with its time, and the ends; the loop's sink where there is no Redis."""

    def __init__(self) -> None:
        self.tokens: dict[str, list[int]] = {}
        self.times: dict[str, list[float]] = {}
        """Seconds of time.perf_counter, one for each token."""
        self.ends: dict[str, End] = {}

    def delta(self, job_id: str, parts: Iterable[DeltaPart]) -> None:
        """Note what came, and when."""
        now = time.perf_counter()
        for part in parts:
            self.tokens.setdefault(job_id, []).extend(part.token_ids)
            self.times.setdefault(job_id, []).extend([now] * len(part.token_ids))

    def restart(self, job_id: str) -> None:
        """Forget what is void."""
        self.tokens[job_id] = []
        self.times[job_id] = []

    def end(self, job_id: str, end: End) -> None:
        """Note the end."""
        self.ends[job_id] = end

    def release(self, job_id: str, reason: str) -> None:
        """Nobody hands a job back here."""
