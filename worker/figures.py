"""Figures of the engine thread: for Prometheus, and for the worker's line in `status`."""

from collections import deque
from typing import Any

from headwater.schemas import CachedTokens

from .engine.engine import Engine
from .job_run import JobRun
from .messages import Claim
from .metrics import WorkerMetrics
from .scheduler import Scheduler, StepPlan
from .sequence import Sequence

_RATE_WINDOW_S = 10.0
_MEMORY_EVERY_S = 1.0
"""Counting the bytes of every row takes a while."""


class Figures:
    """Counts what the loop does. Written by the engine thread; numbers may be read by others."""

    def __init__(self, metrics: WorkerMetrics) -> None:
        self._metrics = metrics
        self._steps: deque[tuple[float, int]] = deque()
        """(time, tokens read) of the steps of the last seconds."""
        self.num_running = 0
        self.num_waiting = 0
        self.num_prompt_tokens = 0
        self.num_computed_prompt_tokens = 0
        self.cached = CachedTokens()
        """Prompt tokens that were not computed, by where they were."""
        self.num_generated_tokens = 0
        self.last_read_s = 0.0
        """When the last step's tokens came back, on the loop's clock."""
        self.step_s = 0.0
        """How long the last step took."""
        self.progress_s = 0.0
        """When a step was last planned, or a first job came: for the liveness check."""
        self._memory_due_s = 0.0

    @property
    def cache_hit_share(self) -> float:
        """Share of the prompt tokens of all finished prefills that was reused."""
        if not self.num_prompt_tokens:
            return 0.0
        return max(0.0, 1 - self.num_computed_prompt_tokens / self.num_prompt_tokens)

    def tokens_per_s(self, now: float) -> float:
        """Tokens generated per second over the last ten seconds."""
        steps = list(self._steps)
        recent = [count for at, count in steps if now - at <= _RATE_WINDOW_S]
        return sum(recent) / _RATE_WINDOW_S

    def opened(self, claim: Claim, *, restarts: bool) -> None:
        """Note that an attempt at a job begins; *restarts* where earlier text became void."""
        kind = "restarted" if restarts else "resumed" if claim.history else "started"
        self._metrics.attempts.labels(kind).inc()
        is_first = claim.begun_at_ms == claim.first_started_ms
        if is_first and claim.queue_ms is not None:
            self._metrics.queue_wait.observe(claim.queue_ms / 1e3)

    def planned(self, plan: StepPlan[Any], scheduler: Scheduler[Any], now: float) -> None:
        """Note a step's plan."""
        self.progress_s = now
        self._count(scheduler)
        self._metrics.preemptions.inc(plan.num_preempted)

    def host(self, seconds: float) -> None:
        """Note what a step took besides waiting for the device."""
        self._metrics.host.observe(seconds)

    def is_memory_due(self, now: float) -> bool:
        """Whether memory() should be told again."""
        return now >= self._memory_due_s

    def memory(
        self, engine: Engine, scheduler: Scheduler[Any], disk_nbytes: int, now: float
    ) -> None:
        """Note what is held: by the rows, by the prefix cache, and on disk."""
        self._memory_due_s = now + _MEMORY_EVERY_S
        self._count(scheduler)
        self._metrics.kv_bytes.set(engine.nbytes)
        padding = engine.padding
        if padding is not None:
            self._metrics.kv_padding.set(padding.kv_share)
            self._metrics.prefill_padding.set(padding.prefill_share)
        self._metrics.cache_bytes.set(scheduler.cache_nbytes)
        self._metrics.disk_bytes.set(disk_nbytes)

    def _count(self, scheduler: Scheduler[Any]) -> None:
        self.num_running = scheduler.num_running
        self.num_waiting = scheduler.num_waiting
        self._metrics.batch.set(self.num_running)
        self._metrics.waiting.set(self.num_waiting)

    def stepped(self, num_tokens: int, now: float, seconds: float) -> None:
        """Note that a step's tokens have been handled; *seconds* from launch to launch."""
        self.last_read_s = now
        self.step_s = seconds
        self._steps.append((now, num_tokens))
        while now - self._steps[0][0] > _RATE_WINDOW_S:
            self._steps.popleft()
        self.num_generated_tokens += num_tokens
        self._metrics.generated.inc(num_tokens)
        self._metrics.step.observe(seconds)

    def token(self, run: JobRun, sequence: Sequence, now: float) -> None:
        """Note one more token of a job."""
        if run.first_token_s is None:
            self._first_token(run, sequence, now)
        elif run.last_token_s is not None:
            self._metrics.itl.observe(now - run.last_token_s)
        run.last_token_s = now

    def _first_token(self, run: JobRun, sequence: Sequence, now: float) -> None:
        run.first_token_s = now
        run.cached = _cached(sequence)
        computed = sequence.num_prompt_tokens - run.num_cached_tokens
        self.num_prompt_tokens += sequence.num_prompt_tokens
        self.num_computed_prompt_tokens += computed
        self._metrics.computed.inc(computed)
        self._metrics.reused.inc(run.num_cached_tokens)
        sources, sums = run.cached.model_dump(), self.cached.model_dump()
        for source, num_tokens in sources.items():
            self._metrics.cached.labels(source).inc(num_tokens)
        self.cached = CachedTokens(**{name: sums[name] + sources[name] for name in sums})
        self._metrics.ttft.observe(now - run.started_s)


def _cached(sequence: Sequence) -> CachedTokens:
    """Return the prompt tokens that a sequence did not compute, by where they came from."""
    num_cached = min(sequence.num_cached_tokens, sequence.num_prompt_tokens)
    disk = min(sequence.num_disk_tokens, num_cached)
    in_flight = min(sequence.num_in_flight_tokens, num_cached - disk)
    return CachedTokens(memory=num_cached - disk - in_flight, disk=disk, in_flight=in_flight)
