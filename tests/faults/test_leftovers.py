"""Every kind of end in one run on a real server, and then every key that is left there."""

import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest
from headwater.producer.client import (
    CancelOutcome,
    Producer,
    new_embedding_job,
    new_job,
    new_score_job,
)
from headwater.producer.embedded import EmbeddedServer
from headwater.producer.result import collect
from headwater.producer.tail import TailSettings, tail
from headwater.producer.tail_steps import TailItem
from headwater.schemas import END_TYPES, Failed, keys

from tests.faults.conftest import (
    ALIAS,
    QUEUE,
    FaultyWorker,
    StartWorker,
    check_end,
    entries_of,
    job,
    result_of,
    types_of,
)
from tests.faults.malformed import KINDS, submit_wrong
from tests.faults.test_poison import DIE_OF_POISON, POISON

RAISING = 9
"""The first token of a prompt that the engine can't compute."""
FAIL_OF_ANOTHER = f"""
forward = Engine._forward

def fail_or_compute(engine, prefill, decode):
    rows = [chunk.sequence for chunk in prefill] + list(decode)
    if any(row.job.prompt_token_ids[0] == {RAISING} for row in rows):
        raise ValueError('cannot compute this')
    return forward(engine, prefill, decode)

Engine._forward = fail_or_compute
"""
HOOKS = DIE_OF_POISON + FAIL_OF_ANOTHER
LONG = 600
ENDS = {
    "finished", "cancelled", "expired",
    "malformed_job", "token_id_out_of_range", "context_length_exceeded", "tokenizer_mismatch",
    "unknown_adapter", "bad_response_format", "deadline_exceeded", "engine_error", "poisoned",
    "job_lost",
}  # fmt: skip


@pytest.fixture
def own_server() -> Iterator[EmbeddedServer]:
    """A server that has held nothing else."""
    with EmbeddedServer() as server:
        yield server


def _await_first_text(producer: Producer, job_id: str) -> None:
    items = producer.tail(job_id)
    assert any(getattr(item, "parts", None) or getattr(item, "text", None) for item in items)


def _run_what_needs_one_worker(producer: Producer) -> list[str]:
    """Submit what ends by itself, and wait for it."""
    several = {"sampling": {"n": 2, "temperature": 1.0}}
    jobs = [
        job(),
        job(**several),
        job(stream="final", namespace="tenant", priority="high"),
        new_score_job(ALIAS, [40, 41], [[1], [2, 3]]),
        new_embedding_job(ALIAS, [40, 41]),
        new_job(ALIAS, [RAISING, 1], max_tokens=4),
        job(max_tokens=LONG, deadline_s=0.001),
    ]
    job_ids = producer.submit_many(jobs)
    job_ids.append(producer.submit(job(), idempotency_key="one"))
    producer.redis.lpush(f"rq:queue:{QUEUE}", b"\xff none of ours")
    for number, kind in enumerate(KINDS.values()):
        if not kind.is_large and kind.ends_as in ENDS:
            submit_wrong(producer, kind, job_id=f"wrong-{number}")
            job_ids.append(f"wrong-{number}")
    for job_id in job_ids:
        result_of(producer, job_id)
    return job_ids


def _cancel_running(producer: Producer) -> str:
    job_id = producer.submit(job(max_tokens=LONG))
    _await_first_text(producer, job_id)
    assert producer.cancel(job_id) is CancelOutcome.REQUESTED
    result_of(producer, job_id)
    return job_id


def _lose_the_stream(producer: Producer) -> str:
    """Delete a running job's stream: its worker tells all of it anew."""
    job_id = producer.submit(job(max_tokens=LONG))
    _await_first_text(producer, job_id)
    producer.redis.delete(keys.stream_key(job_id))
    result_of(producer, job_id)
    assert types_of(producer, job_id)[0] == "restarted"
    return job_id


def _hand_back(producer: Producer, worker: FaultyWorker) -> str:
    job_id = producer.submit(job(max_tokens=LONG))
    _await_first_text(producer, job_id)
    assert worker.stop() == 0
    assert types_of(producer, job_id)[-1] == "released"
    return job_id


def _end_without_any_worker(producer: Producer) -> list[str]:
    """Cancel a queued job, let one expire, and lose one behind everybody's back."""
    cancelled, expired, lost = producer.submit_many([
        job(), job(expires_at=time.time() + 0.1), job()
    ])  # fmt: skip
    assert producer.cancel(cancelled) is CancelOutcome.CANCELLED
    producer.redis.lrem(f"rq:queue:{QUEUE}", 0, lost)
    producer.redis.hset(f"rq:job:{lost}", "status", "failed")
    producer.redis.expire(f"rq:job:{lost}", 3600)
    for job_id in (expired, lost):
        _read_on(producer, job_id)
    return [cancelled, expired, lost]


def _let_records_lapse(producer: Producer) -> None:
    """Let the minutes pass that RQ's records of workers last; one that lives makes its own anew."""
    producer.redis.delete(*producer.redis.scan_iter(match="rq:worker:*"))


def _read_on(producer: Producer, job_id: str) -> list[TailItem]:
    settings = TailSettings(block_ms=100, lost_after_s=0.2)
    return list(tail(producer.redis, job_id, settings=settings))


def _end_of(producer: Producer, job_id: str) -> str:
    check_end(producer, job_id)
    end: Any = entries_of(producer, job_id)[-1].event
    assert isinstance(end, END_TYPES)
    return end.code if isinstance(end, Failed) else end.type


@pytest.mark.long
def test_after_every_kind_of_end_every_key_has_an_expiry(
    own_server: EmbeddedServer, start_worker: StartWorker
) -> None:
    """Nothing stays on the server for ever, not even a name."""
    with Producer(own_server.url) as producer:
        first = start_worker("--drain-s", "0", before=HOOKS, url=own_server.url)
        job_ids = _run_what_needs_one_worker(producer)
        job_ids += [_cancel_running(producer), _lose_the_stream(producer)]
        job_ids.append(_hand_back(producer, first))
        job_ids += _end_without_any_worker(producer)
        poison = producer.submit(new_job(ALIAS, [POISON, 1], max_tokens=4))
        for _ in range(3):
            # Each of them resumes what was handed back, or dies of the poison before.
            assert start_worker(before=HOOKS, url=own_server.url).wait() == 70
        last = start_worker(before=HOOKS, url=own_server.url)
        job_ids.append(poison)
        for job_id in job_ids:
            collect(producer.tail(job_id))
        start_worker(url=own_server.url).stop(signal.SIGKILL)
        _let_records_lapse(producer)
        assert last.stop() == 0

        assert {_end_of(producer, job_id) for job_id in job_ids} == ENDS
        redis = producer.redis
        assert redis.dbsize() > len(job_ids)
        assert [key for key in redis.scan_iter() if redis.ttl(key) == -1] == []
