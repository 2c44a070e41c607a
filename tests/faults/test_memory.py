"""A worker's memory after thousands of jobs of all sorts: what it was after the first ones."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from headwater.producer.client import Producer, new_embedding_job, new_job, new_score_job
from headwater.producer.embedded import EmbeddedServer
from headwater.schemas import END_TYPES, Finished, GenerationJob, decode_entry, keys

from tests.faults.conftest import (
    ALIAS,
    FaultyWorker,
    check_no_lasting_key,
    result_of,
    worker_starter,
)

ROUND = 500
FIRST_JOBS = 2_000
ALL_JOBS = 20_000
NUM_NAMESPACES = 40
FORMATS = 8
"""One job in so many has a response format, and each its own."""
KV_BUDGET_MB = 4
"""Full after a fraction of the first jobs, whose prompts all differ."""


def _jobs(count: int) -> Iterator[GenerationJob]:
    dice = random.Random(7)
    for number in range(count):
        prompt = [dice.randrange(256) for _ in range(dice.randrange(4, 24))]
        yield _job(number, prompt, dice)


def _job(number: int, prompt: list[int], dice: random.Random) -> GenerationJob:
    fields: dict[str, Any] = {
        "namespace": f"tenant-{number % NUM_NAMESPACES}",
        "priority": dice.choice(["high", "normal", "low"]),
        "metadata": {"number": number},
    }
    if number % 16 == 1:
        return new_score_job(ALIAS, prompt, [[1, 2], [3]], **fields)
    if number % 16 == 2:
        return new_embedding_job(ALIAS, prompt, **fields)
    if number % FORMATS == 3:
        fields["response_format"] = {"type": "choice", "choices": [f"a{number}", "b"]}
        return new_job(ALIAS, prompt, max_tokens=2, **fields)
    fields["sampling"] = {
        "temperature": dice.choice([0.0, 1.0]),
        "n": dice.choice([1, 1, 1, 2]),
        "repetition_penalty": dice.choice([1.0, 1.2]),
        "logit_bias": dice.choice([{}, {number % 256: 1.0}]),
    }
    fields["stream"] = dice.choice(["deltas", "final"])
    fields["stop"] = dice.choice([(), (f"stop {number}",)])
    fields["logprobs"] = dice.choice([None, 2])
    return new_job(ALIAS, prompt, max_tokens=dice.randrange(1, 6), ignore_eos=True, **fields)


def _wait_for_all(producer: Producer, job_ids: list[str]) -> None:
    """Wait until each has ended, and finished."""
    result_of(producer, job_ids[-1])
    with producer.redis.pipeline(transaction=False) as pipeline:
        for job_id in job_ids:
            pipeline.xrevrange(keys.stream_key(job_id), count=1)
        replies: list[Any] = pipeline.execute()
    for job_id, reply in zip(job_ids, replies, strict=True):
        last = decode_entry(*reply[0]).event if reply else None
        end = last if isinstance(last, END_TYPES) else result_of(producer, job_id).end
        assert isinstance(end, Finished)


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_twenty_thousand_jobs_leave_the_memory_as_the_first_two_thousand_did(
    server: EmbeddedServer, producer: Producer, format_model: Path
) -> None:
    """Every job has a prompt, a format, a stop string or a bias of its own."""
    with worker_starter(server.url, format_model) as start:
        _run_all(producer, start("--kv-budget-mb", str(KV_BUDGET_MB)))
    check_no_lasting_key(producer)


def _run_all(producer: Producer, worker: FaultyWorker) -> None:
    process = psutil.Process(worker.process.pid)
    jobs = _jobs(ALL_JOBS)
    sizes = []
    for _ in range(ALL_JOBS // ROUND):
        job_ids = producer.submit_many(next(jobs) for _ in range(ROUND))
        _wait_for_all(producer, job_ids)
        sizes.append(process.memory_info().rss)

    base = sizes[FIRST_JOBS // ROUND - 1]
    print(f"RSS after 2,000: {base / 2**20:.1f} MiB; at the end {sizes[-1] / 2**20:.1f}, each 2,000: "
          + " ".join(f"{size / 2**20:.1f}" for size in sizes[3::4]))  # fmt: skip
    assert sizes[-1] <= 1.05 * base
    assert worker.stop() == 0
