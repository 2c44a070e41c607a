"""Scheduler, prefix cache and engine together give what each prompt alone gives."""

import random
from dataclasses import dataclass, field
from typing import Any

import pytest
from headwater.schemas import SamplingParams
from headwater.worker.engine.engine import Engine, PendingStep
from headwater.worker.engine.merged_runner import MergedRunner
from headwater.worker.engine.row_runner import RowRunner
from headwater.worker.engine.runner import ModelRunner
from headwater.worker.engine.sampler import Sampler
from headwater.worker.engine.shared_kv import SharedPrefixRunner
from headwater.worker.prefix_cache import PrefixCache
from headwater.worker.scheduler import Footprint, Scheduler, SchedulerSettings
from headwater.worker.sequence import Sequence, SequenceStatus

from tests.exactness.reference import ExactnessReport
from tests.exactness.workload import random_prompts, sequence
from tests.tiny_models import TINY_FAMILIES, VOCABULARY_SIZE, tiny_model

PROMISED = list(TINY_FAMILIES)[:5]
SHARING = ["llama", "qwen3_moe", "gemma3_text", "gpt_oss", "qwen3_5", "qwen3_next"]


@dataclass
class ScheduledWorkload:
    """Steps as the worker's loop does: plan, launch, read the step before."""

    runner: ModelRunner
    settings: SchedulerSettings
    rng: random.Random
    arriving: list[Sequence]
    engine: Engine = field(init=False)
    scheduler: Scheduler = field(init=False)
    cache: PrefixCache = field(init=False)
    ended: list[Sequence] = field(default_factory=list)
    live: list[Sequence] = field(default_factory=list)
    now: float = 0.0
    num_preempted: int = 0
    num_computed_tokens: int = 0

    def __post_init__(self) -> None:
        self.engine = Engine(self.runner, Sampler(VOCABULARY_SIZE, ()))
        self.cache = PrefixCache(self.engine.cache_kind)
        self.scheduler = Scheduler(self.cache, self.settings)

    def run(self) -> list[Sequence]:
        in_flight: PendingStep | None = None
        for _ in range(3000):
            while self.arriving and self.rng.random() < 0.4:
                self.live.append(self.arriving.pop())
                self.scheduler.add(self.live[-1], self.now)
            if self.scheduler.is_idle and in_flight is None and not self.arriving:
                self.cache.check_integrity()
                return self.ended
            self.now += 0.01
            previous, in_flight = in_flight, self._launch()
            if previous is not None:
                self._read(previous)
            for row in self.live:
                if self.rng.random() < 0.005:
                    self._end(row)
        raise AssertionError("the workload does not end")

    def _launch(self) -> PendingStep | None:
        plan = self.scheduler.schedule(self.now)
        self.num_preempted += plan.num_preempted
        for commit in plan.early_commits:
            self.scheduler.commit(commit, self.engine.extract(*commit))
        for row in plan.detach:
            self.engine.detach(row)
        for row, prefix in plan.admit:
            self.engine.attach(row, prefix)
        for row, prefix in plan.rebase:
            self.engine.rebase(row, prefix)
        if not plan.has_work:
            return None
        self.num_computed_tokens += plan.num_prefill_tokens + len(plan.decode)
        step = self.engine.launch(plan.prefill, plan.decode)
        for commit in plan.commits:
            segment = self.engine.extract(*commit)
            self.engine.rebase(commit.sequence, self.scheduler.commit(commit, segment))
        return step

    def _read(self, step: PendingStep) -> None:
        result = step.read()
        assert not result.failed, result.failed
        for output in result.outputs:
            row = output.sequence
            if len(row.output_token_ids) == row.job.max_tokens:
                self._end(row)

    def _end(self, row: Sequence) -> None:
        if row.is_finished:
            return
        row.status = SequenceStatus.FINISHED
        self.scheduler.finish(row)
        self.ended.append(row)


def random_settings(rng: random.Random) -> SchedulerSettings:
    """A small batch, short chunks or none, and in half of the cases memory for few rows."""
    is_tight = rng.random() < 0.5
    return SchedulerSettings(
        max_batch=rng.choice([2, 4, 6]),
        prefill_chunk=rng.choice([None, 5, 16]),
        max_prefill_tokens=rng.choice([16, 64]),
        min_shared_tokens=2,
        growth_tokens=4,
        max_bytes=40_000 if is_tight else None,
        footprint=Footprint(bytes_per_token=256),
    )


def check_scheduled(family: str, runner_class, seeds) -> None:
    """Compare every row of seeded workloads with its prompt alone."""
    model = tiny_model(family)
    report = ExactnessReport()
    for seed in seeds:
        rng = random.Random(seed)
        arriving = [sequence(prompt, rng.randint(1, 16)) for prompt in random_prompts(rng, 10)]
        num_jobs = len(arriving)
        workload = ScheduledWorkload(runner_class(model), random_settings(rng), rng, arriving)
        ended = workload.run()

        assert len(ended) == num_jobs
        assert workload.runner.nbytes == 0, seed
        for row in ended:
            report.compare(model, row.job.prompt_token_ids, row.output_token_ids, f"seed {seed}")
    report.check()


@pytest.mark.parametrize("family", PROMISED)
def test_scheduled_rows_get_the_tokens_of_their_prompts_alone(family) -> None:
    check_scheduled(family, MergedRunner, range(10))


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_scheduled_rows_run_one_at_a_time_get_the_same_tokens(family) -> None:
    check_scheduled(family, RowRunner, range(3))


@pytest.mark.parametrize("family", SHARING)
def test_scheduled_rows_over_shared_segments_are_exact_too(family) -> None:
    check_scheduled(family, SharedPrefixRunner, range(10 if family in PROMISED[:2] else 3))


@pytest.mark.long
@pytest.mark.parametrize("family", SHARING)
def test_a_hundred_scheduled_workloads_over_shared_segments_are_exact(family) -> None:
    check_scheduled(family, SharedPrefixRunner, range(10, 110))


def random_sampling(rng: random.Random) -> SamplingParams:
    """Any mixture of filters, greedy now and then."""
    return SamplingParams(
        temperature=rng.choice([0.0, 0.5, 1.0, 2.0]),
        top_k=rng.choice([0, 0, 1, 20, VOCABULARY_SIZE]),
        top_p=rng.choice([1.0, 1.0, 0.8, 0.3]),
        min_p=rng.choice([0.0, 0.0, 0.1]),
        seed=rng.randrange(1000),
        **(random_adjustments(rng) if rng.random() < 0.6 else {}),
    )


def random_adjustments(rng: random.Random) -> dict[str, Any]:
    """Penalties over any window, biases and banned ids; each absent now and then."""
    ids = rng.sample(range(VOCABULARY_SIZE), 12)
    return {
        "repetition_penalty": rng.choice([1.0, 1.3, 0.7, 2.0]),
        "repetition_window": rng.choice([0, 1, 2, 5, 20]),
        "presence_penalty": rng.choice([0.0, 0.0, 1.5, -0.5]),
        "frequency_penalty": rng.choice([0.0, 0.0, 0.8, -0.4]),
        "logit_bias": rng.choice([{}, {token: rng.uniform(-5, 5) for token in ids[:6]}]),
        "bad_token_ids": rng.choice([(), tuple(ids[6:])]),
    }


def check_drawn(family: str, seeds) -> None:
    """Compare rows that each draw by settings of their own with their prompts alone."""
    model = tiny_model(family)
    report = ExactnessReport()
    for seed in seeds:
        rng = random.Random(seed)
        rows = [
            sequence(prompt, rng.randint(1, 16), sampling=random_sampling(rng))
            for prompt in random_prompts(rng, 10)
        ]
        ScheduledWorkload(MergedRunner(model), random_settings(rng), rng, list(rows)).run()
        for row in rows:
            report.compare_drawn(model, row, f"seed {seed}")
    report.check()


@pytest.mark.parametrize("family", PROMISED)
def test_rows_that_draw_get_the_draws_of_their_prompts_alone(family) -> None:
    check_drawn(family, range(4))


@pytest.mark.long
@pytest.mark.parametrize("family", PROMISED)
def test_a_hundred_workloads_of_drawn_rows_are_exact(family) -> None:
    check_drawn(family, range(10, 110))


@pytest.mark.long
@pytest.mark.parametrize("runner_class", [RowRunner, MergedRunner])
@pytest.mark.parametrize("family", TINY_FAMILIES)
def test_a_hundred_scheduled_workloads_are_exact(family, runner_class) -> None:
    check_scheduled(family, runner_class, range(10, 110))


@pytest.mark.parametrize(
    ("family", "runner_class"),
    [(family, MergedRunner) for family in PROMISED]
    + [(family, SharedPrefixRunner) for family in SHARING],
)
def test_rows_that_are_preempted_for_memory_go_on_with_the_same_text(family, runner_class) -> None:
    model = tiny_model(family)
    rng = random.Random(3)
    rows = [sequence([rng.randrange(VOCABULARY_SIZE) for _ in range(8)], 24) for _ in range(6)]
    settings = SchedulerSettings(
        max_batch=6,
        max_bytes=64 * 256,
        growth_tokens=1,
        footprint=Footprint(bytes_per_token=256),
    )
    workload = ScheduledWorkload(runner_class(model), settings, rng, list(rows))
    rng.random = lambda: 0.3  # they arrive one after the other, nothing is cancelled
    workload.run()

    report = ExactnessReport()
    for row in rows:
        assert len(row.output_token_ids) == 24
        report.compare(model, row.job.prompt_token_ids, row.output_token_ids)
    report.check()
    assert workload.num_preempted > 0


def test_prompts_that_share_a_prefix_compute_it_once() -> None:
    model = tiny_model("llama")
    shared = [(7 * index) % VOCABULARY_SIZE for index in range(32)]
    rows = [sequence([*shared, index, index + 1], 2) for index in range(8)]
    settings = SchedulerSettings(max_batch=8, min_shared_tokens=4)
    workload = ScheduledWorkload(MergedRunner(model), settings, random.Random(99), [])
    for row in rows:
        workload.scheduler.add(row, 0.0)
    workload.rng.random = lambda: 1.0  # no cancellation
    ended = workload.run()

    report = ExactnessReport()
    for row in ended:
        report.compare(model, row.job.prompt_token_ids, row.output_token_ids)
    report.check()
    assert len(ended) == 8
    # The shared tokens once, two own tokens and one decoded token each.
    assert workload.num_computed_tokens == 32 + 8 * 3
