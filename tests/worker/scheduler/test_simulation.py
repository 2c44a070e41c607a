"""Whole runs of the scheduler over an engine that checks every instruction."""

import random
from collections.abc import Callable
from typing import Any

import pytest
from headwater.worker.scheduler import Footprint, SchedulerSettings
from headwater.worker.segment import CacheKind
from headwater.worker.sequence import Sequence

Make = Callable[..., Any]


def shared_prompts(rng: random.Random, num_jobs: int, longest: int = 80) -> list[list[int]]:
    """Prompts that branch off one another anywhere; each ends in a token of its own."""
    prompts: list[list[int]] = []
    for index in range(num_jobs):
        head: list[int] = []
        if prompts and rng.random() < 0.8:
            parent = rng.choice(prompts[-50:])
            head = parent[: rng.randrange(len(parent))]
        tail = [rng.randrange(50) for _ in range(rng.randrange(longest - len(head) // 2))]
        prompts.append([*head, *tail, 10_000 + index][-300:])
    return prompts


def num_unique_tokens(prompts: list[list[int]]) -> int:
    """Nodes of the trie of all prompts."""
    return len({tuple(prompt[:end]) for prompt in prompts for end in range(1, len(prompt) + 1)})


@pytest.mark.parametrize("seed", range(10))
def test_no_prompt_token_is_computed_twice_while_memory_suffices(
    seed: int, make_worker: Make, make_sequence: Make
) -> None:
    rng = random.Random(seed)
    prompts = shared_prompts(rng, 300)
    worker = make_worker(
        settings=SchedulerSettings(min_shared_tokens=1, max_batch=rng.choice([1, 4, 32]))
    )
    for prompt in prompts:
        worker.add(make_sequence(prompt, max_tokens=rng.randrange(1, 6)))
        if rng.random() < 0.3:
            worker.step()
    worker.run()

    assert worker.engine.num_prompt_tokens == num_unique_tokens(prompts)
    assert len(worker.finished) == len(prompts)
    worker.check_baseline()


def random_run(seed: int, num_jobs: int, make_worker: Make, make_sequence: Make) -> None:
    """Arrivals, cancellations and failures at any moment, over a budget that is too small."""
    rng = random.Random(seed)
    kind = rng.choice(list(CacheKind))
    max_bytes = rng.choice([None, 4_000, 20_000])
    worker = make_worker(
        kind=kind,
        token_s=0.001,
        settings=SchedulerSettings(
            max_batch=rng.choice([1, 3, 16]),
            max_bytes=max_bytes,
            footprint=Footprint(bytes_per_token=10, shares_prefix=rng.random() < 0.5),
            prefill_chunk=rng.choice([None, 7, 64]),
            target_itl_ms=rng.choice([20, 400]),
            max_wait_s=rng.choice([0.5, 30]),
            min_shared_tokens=rng.choice([1, 16]),
        ),
    )
    alive: list[Sequence] = []
    num_ended_early = 0
    for prompt in shared_prompts(rng, num_jobs):
        priority = rng.choice(["high", "normal", "low"])
        sequence = make_sequence(
            prompt,
            rng.randrange(1, 12),
            priority,
            runs_alone=rng.random() < 0.01,
            namespace=rng.choice(["a", "b"]),
        )
        worker.add(sequence)
        alive.append(sequence)
        while rng.random() < 0.6:
            worker.step()
        if rng.random() < 0.15:
            victim = alive.pop(rng.randrange(len(alive)))
            if not victim.is_finished:
                num_ended_early += 1
                rng.choice([worker.scheduler.finish, worker.scheduler.drop])(victim)
        if rng.random() < 0.05:
            worker.cache.check_integrity()
    worker.run()

    assert len(worker.finished) == num_jobs - num_ended_early
    for sequence in worker.finished:
        assert len(sequence.output_token_ids) == sequence.job.max_tokens
    if max_bytes == 20_000:
        # A row never takes more than a tenth of this budget, so planning must hold it.
        assert worker.peak_nbytes <= max_bytes
    worker.check_baseline()


@pytest.mark.parametrize("seed", range(40))
def test_everybody_finishes_and_nothing_leaks_whatever_happens(
    seed: int, make_worker: Make, make_sequence: Make
) -> None:
    random_run(seed, 150, make_worker, make_sequence)


@pytest.mark.long
@pytest.mark.timeout(1_800)
def test_a_hundred_thousand_jobs_finish(make_worker: Make, make_sequence: Make) -> None:
    for seed in range(1_000, 1_050):
        random_run(seed, 2_000, make_worker, make_sequence)
