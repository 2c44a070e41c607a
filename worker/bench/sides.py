"""The two sides of a scenario with a model: our loop, and mlx-lm's batch generator."""

import copy
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import mlx.core as mx
from headwater.schemas import GenerationJob
from mlx_lm.generate import BatchGenerator
from mlx_lm.models.cache import LRUPromptCache
from mlx_lm.sample_utils import make_sampler

from ..assembly import LoopSettings, build_loop
from ..engine.loading import LoadedModel, load_model
from ..engine.parity import choose_runner
from ..engine.runner import ModelRunner
from ..loop import GenerationLoop
from ..messages import Claim
from ..metrics import WorkerMetrics
from .record import Record, RecordingSink, sequence_name
from .workload import ALIAS, Arrivals, Prompts, make_job

_WARMUP_TOKENS = 128
_WARMUP_SEED = 1_000_003


class Lab:
    """A loaded model and the runner that it gets; both sides compute with the same weights."""

    def __init__(self, model: str) -> None:
        self.loaded: LoadedModel = load_model(model)
        self.runner = choose_runner(
            self.loaded.model, self.loaded.vocab_size, config=self.loaded.config
        )

    def with_runner(self, runner: ModelRunner) -> "Lab":
        """Return a lab with the same weights and another runner."""
        twin = copy.copy(self)
        twin.runner = runner
        return twin


def run_ours(lab: Lab, arrivals: Arrivals, settings: LoopSettings) -> Record:
    """Run the jobs through a loop of our own that has run one short job before.

    That one lets the loop learn the model's speed, as a worker has that is up for a minute.
    """
    started = 0.0
    sink = RecordingSink(lambda: time.perf_counter() - started)
    loop = build_loop(lab.loaded, settings, sink, WorkerMetrics(), runner=lab.runner)
    warmup = Prompts(lab.loaded.vocab_size, _WARMUP_SEED).tokens(_WARMUP_TOKENS)
    _admit(loop, make_job("warm-up", warmup, 4))
    _run_out(loop)
    computed_before = loop.figures.num_computed_prompt_tokens
    record = Record(arrivals)
    sink.start(record)
    cpu_before = time.process_time()
    started = time.perf_counter()
    while not arrivals.is_done:
        now = time.perf_counter() - started
        for job in arrivals.take(now):
            _admit(loop, job)
        if loop.is_idle:
            time.sleep(max(0.0, arrivals.next_s - now))
            continue
        loop.step()
        stepped = time.perf_counter() - started
        record.step_s.append(stepped - now)
        record.peak_kv_bytes = max(record.peak_kv_bytes, loop.kv_nbytes)
        for job_id in sink.ended:
            arrivals.ended(job_id, record.tokens[job_id], stepped)
        sink.ended.clear()
    record.cpu_s = time.process_time() - cpu_before
    record.num_computed_prompt_tokens = loop.figures.num_computed_prompt_tokens - computed_before
    _run_out(loop)
    return record


def _admit(loop: GenerationLoop, job: GenerationJob) -> None:
    loop.admit(Claim(job=job, queue_name="", execution_id="", attempt=1))


def _run_out(loop: GenerationLoop) -> None:
    while not loop.is_idle:
        loop.step()


def run_mlx_lm(
    lab: Lab,
    arrivals: Arrivals,
    batch: int,
    *,
    prompt_cache: LRUPromptCache | None = None,
    temperature: float = 0.0,
) -> Record:
    """Run the jobs through BatchGenerator with its own defaults.

    With *prompt_cache* a job starts from the nearest prefix in it, and its end is put there, as
    mlx-lm's server does. All jobs must ask for *temperature*.
    """
    sampler = make_sampler(temp=temperature) if temperature else None
    peer = _MlxLm(lab, batch, prompt_cache, sampler)
    peer.warm_up()
    record = Record(arrivals)
    cpu_before = time.process_time()
    started = time.perf_counter()
    while not arrivals.is_done:
        now = time.perf_counter() - started
        for job in arrivals.take(now):
            record.num_computed_prompt_tokens += peer.insert(job)
        if not arrivals.num_open:
            time.sleep(max(0.0, arrivals.next_s - now))
            continue
        peer.step(record, lambda: time.perf_counter() - started)
        record.step_s.append(time.perf_counter() - started - now)
        record.peak_kv_bytes = max(record.peak_kv_bytes, peer.kv_nbytes)
    record.cpu_s = time.process_time() - cpu_before
    peer.close()
    return record


class _Row(NamedTuple):
    job: GenerationJob
    choice: int


class _MlxLm:
    """mlx-lm's batch generator, with jobs for its uids."""

    def __init__(
        self,
        lab: Lab,
        batch: int,
        prompt_cache: LRUPromptCache | None,
        sampler: Callable[[mx.array], mx.array] | None,
    ) -> None:
        self._lab = lab
        self._prompt_cache = prompt_cache
        self._generator: Any = BatchGenerator(
            lab.loaded.model, completion_batch_size=batch, sampler=sampler
        )
        self._rows: dict[int, _Row] = {}
        self._num_open: dict[str, int] = {}
        """Choices that have not ended, by job."""

    @property
    def kv_nbytes(self) -> int:
        """Bytes of running rows and of the prompt cache."""
        cached = 0 if self._prompt_cache is None else self._prompt_cache.nbytes
        return int(self._generator.prompt_cache_nbytes) + cached

    def warm_up(self) -> None:
        """Run one short job, as our side does."""
        prompt = Prompts(self._lab.loaded.vocab_size, _WARMUP_SEED).tokens(_WARMUP_TOKENS)
        self._generator.insert([list(prompt)], max_tokens=[4])
        while not any(each.finish_reason for each in self._generator.next()[1]):
            pass

    def insert(self, job: GenerationJob) -> int:
        """Take a job; return how many prompt tokens have to be computed for it."""
        self._num_open[job.job_id] = job.sampling.n
        return sum(self._insert_choice(job, choice) for choice in range(job.sampling.n))

    def _insert_choice(self, job: GenerationJob, choice: int) -> int:
        prompt = list(job.prompt_token_ids)
        cache, rest = None, prompt
        if self._prompt_cache is not None:
            cache, rest = self._prompt_cache.fetch_nearest_cache(ALIAS, prompt)
        done = prompt[: len(prompt) - len(rest)]
        (uid,) = self._generator.insert(
            [rest], max_tokens=[job.max_tokens], caches=[cache], all_tokens=[done]
        )
        self._rows[uid] = _Row(job, choice)
        return len(rest)

    def step(self, record: Record, clock: Callable[[], float]) -> None:
        """Let it do what it does next, and note the tokens that come."""
        _, responses = self._generator.next()
        now = clock()
        for response in responses:
            row = self._rows[response.uid]
            record.add(sequence_name(row.job.job_id, row.choice), [response.token], now)
            if response.finish_reason is not None:
                del self._rows[response.uid]
                self._end(row.job, response, record, clock)

    def _end(
        self, job: GenerationJob, response: Any, record: Record, clock: Callable[[], float]
    ) -> None:
        if self._prompt_cache is not None:
            self._prompt_cache.insert_cache(ALIAS, response.all_tokens[:], response.prompt_cache)
        self._num_open[job.job_id] -= 1
        if not self._num_open[job.job_id]:
            record.arrivals.ended(job.job_id, record.tokens[job.job_id], clock())

    def close(self) -> None:
        """Wait for what it has launched, and give back what it set."""
        mx.synchronize(self._generator.stream)
        self._generator.close()
