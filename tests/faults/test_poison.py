"""A job that ends every process which runs it, among jobs that never did any harm."""

from headwater.producer.client import Producer, new_job
from headwater.producer.result import collect
from headwater.schemas import Failed, Finished

from tests.faults.conftest import ALIAS, StartWorker, check_end, check_no_lasting_key, types_of

POISON = 7
DIE_OF_POISON = f"""
import os
from headwater.worker.engine.engine import Engine
launch = Engine.launch

def die_or_launch(engine, prefill, decode):
    if any(chunk.sequence.job.prompt_token_ids[0] == {POISON} for chunk in prefill):
        os._exit(70)
    return launch(engine, prefill, decode)

Engine.launch = die_or_launch
"""
FAIL_OF_POISON = f"""
from headwater.worker.engine.engine import Engine
forward = Engine._forward

def fail_or_compute(engine, prefill, decode):
    rows = [chunk.sequence for chunk in prefill] + list(decode)
    if any(row.job.prompt_token_ids[0] == {POISON} for row in rows):
        raise ValueError('cannot compute this')
    return forward(engine, prefill, decode)

Engine._forward = fail_or_compute
"""
NUM_NEIGHBOURS = 9


def _submit(producer: Producer) -> tuple[str, list[str]]:
    jobs = [
        new_job(ALIAS, [10 + index, 3, 5], max_tokens=30, ignore_eos=True)
        for index in range(NUM_NEIGHBOURS)
    ]
    poison = new_job(ALIAS, [POISON, 3, 5], max_tokens=30)
    jobs.insert(NUM_NEIGHBOURS // 2, poison)
    producer.submit_many(jobs)
    return poison.job_id, [job.job_id for job in jobs if job is not poison]


def test_a_poisonous_job_is_dead_lettered_and_its_neighbours_finish(
    producer: Producer, start_worker: StartWorker
) -> None:
    poison, neighbours = _submit(producer)
    options = ("--max-batch", "4", "--drain-s", "60")

    # Three lives are what it costs; the fourth worker must survive.
    for _ in range(3):
        assert start_worker(*options, before=DIE_OF_POISON).wait() == 70
    survivor = start_worker(*options, before=DIE_OF_POISON)

    end = collect(producer.tail(poison)).end
    assert isinstance(end, Failed)
    assert end.code == "poisoned"
    for job_id in neighbours:
        result = collect(producer.tail(job_id))
        assert isinstance(result.end, Finished)
        assert len(result.choices[0].token_ids) == 30
    assert survivor.stop() == 0
    for job_id in (poison, *neighbours):
        check_end(producer, job_id)
    assert types_of(producer, poison) == ["started", "resumed", "resumed", "resumed", "failed"]
    check_no_lasting_key(producer)


def test_a_job_that_raises_fails_alone(producer: Producer, start_worker: StartWorker) -> None:
    poison, neighbours = _submit(producer)
    worker = start_worker("--max-batch", "4", before=FAIL_OF_POISON)

    end = collect(producer.tail(poison)).end
    assert isinstance(end, Failed)
    assert end.code == "engine_error"
    assert "cannot compute this" in end.message
    for job_id in neighbours:
        result = collect(producer.tail(job_id))
        assert isinstance(result.end, Finished)
        assert types_of(producer, job_id).count("started") == 1
        assert len(result.choices[0].token_ids) == 30
    assert worker.stop() == 0
    assert any(poison in line and "Traceback" in line for line in worker.log)
