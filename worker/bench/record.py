"""Record: what one side did with its jobs, token by token, and the figures of it."""

import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import pairwise

from headwater.schemas import DeltaPart, End, Finished

from .report import Figures
from .scenario import BenchError
from .workload import Arrivals, num_unique_tokens


@dataclass
class Record:
    """One run of one side. Seconds count from the side's start."""

    arrivals: Arrivals
    tokens: dict[str, list[int]] = field(default_factory=dict)
    """By sequence: see sequence_name."""
    times: dict[str, list[float]] = field(default_factory=dict)
    """When each token came, by sequence."""
    step_s: list[float] = field(default_factory=list)
    num_computed_prompt_tokens: int = 0
    peak_kv_bytes: int = 0
    cpu_s: float = 0.0
    """Processor seconds of all threads; they tell more than the clock on a busy machine."""

    def add(self, sequence: str, token_ids: Iterable[int], now: float) -> None:
        """Note tokens of a sequence."""
        for token_id in token_ids:
            self.tokens.setdefault(sequence, []).append(token_id)
            self.times.setdefault(sequence, []).append(now)

    def figures(self, is_asked: Callable[[str], bool] = lambda _: True) -> Figures:
        """Return the figures; TTFT of those jobs that *is_asked* names."""
        firsts = [
            times[0] - self.arrivals.arrived_s[job_of(sequence)]
            for sequence, times in self.times.items()
            if is_asked(job_of(sequence))
        ]
        gaps = [
            after - before for times in self.times.values() for before, after in pairwise(times)
        ]
        jobs = self.arrivals.jobs.values()
        prompts = [job.prompt_token_ids for job in jobs for _ in range(job.sampling.n)]
        wall_s = max(times[-1] for times in self.times.values())
        num_generated = sum(map(len, self.tokens.values()))
        return {
            "wall_s": wall_s,
            "cpu_s": self.cpu_s,
            "prompt_tokens": float(sum(map(len, prompts))),
            "prompt_tokens_computed": float(self.num_computed_prompt_tokens),
            "prompt_tokens_unique": float(num_unique_tokens(prompts)),
            "generated_tokens": float(num_generated),
            "generated_tokens_per_s": num_generated / wall_s,
            **_quantiles("ttft", firsts),
            **_quantiles("itl", gaps),
            "max_gap_ms": max(gaps, default=0.0) * 1e3,
            "step_p50_ms": statistics.median(self.step_s) * 1e3,
            "peak_kv_bytes": float(self.peak_kv_bytes),
        }


def sequence_name(job_id: str, choice: int) -> str:
    """Return the name under which a record keeps a job's choice; the first one's is the job's."""
    return f"{job_id}/{choice}" if choice else job_id


def job_of(sequence: str) -> str:
    """Return the job id in a sequence's name."""
    return sequence.partition("/")[0]


def _quantiles(name: str, seconds: list[float]) -> Figures:
    if len(seconds) < 2:
        p50 = p99 = seconds[0] if seconds else 0.0
    else:
        hundredths = statistics.quantiles(seconds, n=100, method="inclusive")
        p50, p99 = hundredths[49], hundredths[98]
    return {f"{name}_p50_ms": p50 * 1e3, f"{name}_p99_ms": p99 * 1e3}


class RecordingSink:
    """The loop's sink where there is no Redis: it notes every token with its time."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.record = Record(Arrivals(()))
        self.ended: list[str] = []
        """Jobs that ended since somebody looked."""

    def start(self, record: Record) -> None:
        """Forget what was, and write into *record* from now on."""
        self.record = record
        self.ended = []

    def delta(self, job_id: str, parts: Iterable[DeltaPart]) -> None:
        """Note what came, and when."""
        now = self._clock()
        for part in parts:
            self.record.add(sequence_name(job_id, part.choice), part.token_ids, now)

    def restart(self, job_id: str) -> None:
        """Raise: only what an earlier attempt published can be void."""
        raise BenchError(f"{job_id} was restarted")

    def end(self, job_id: str, end: End) -> None:
        """Note the end. Raises BenchError for a job that failed."""
        if not isinstance(end, Finished):
            raise BenchError(f"{job_id} did not finish: {end}")
        self.ended.append(job_id)

    def release(self, job_id: str, reason: str) -> None:
        """Nobody hands a job back here."""
