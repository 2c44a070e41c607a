"""Workers that are killed, stopped past their lease, or told to end, at every stage of a job."""

import signal
from pathlib import Path

import pytest
from headwater.producer.client import Producer
from headwater.producer.result import ChoiceResult
from headwater.producer.stream_reader import Output
from headwater.schemas import Delta, Finished
from headwater.worker.engine.loading import load_model

from tests.exactness.reference import greedy_alone
from tests.faults.conftest import (
    NUM_TOKENS,
    PROMPT,
    STAGES,
    StartWorker,
    check_end,
    check_no_lasting_key,
    entries_of,
    job,
    result_of,
    types_of,
)


def _stages(*regular: str) -> list[object]:
    """Return all stages; those that are not named run with the long tests."""
    return [
        stage if stage in regular else pytest.param(stage, marks=pytest.mark.long)
        for stage in STAGES
    ]


@pytest.fixture(scope="module")
def undisturbed(model: Path) -> ChoiceResult:
    """The job's output, by the model alone."""
    loaded = load_model(str(model))
    output = tuple(greedy_alone(loaded.model, PROMPT, NUM_TOKENS))
    return ChoiceResult(output, loaded.tokenizer.decode(list(output)), None)


def _check(producer: Producer, job_id: str, undisturbed: ChoiceResult) -> None:
    result = result_of(producer, job_id)
    assert isinstance(result.end, Finished)
    assert result.choices[0].token_ids == undisturbed.token_ids
    assert result.choices[0].text == undisturbed.text
    assert result.end.usage.completion_tokens == NUM_TOKENS
    check_end(producer, job_id)


@pytest.mark.parametrize("stage", _stages("claimed", "decode", "finalizing"))
def test_a_job_whose_worker_is_killed_goes_on_at_the_next_token(
    producer: Producer, start_worker: StartWorker, undisturbed: ChoiceResult, stage: str
) -> None:
    victim = start_worker(before=STAGES[stage])
    job_id = producer.submit(job())
    victim.wait_for_stage()
    victim.stop(signal.SIGKILL)

    heir = start_worker()
    _check(producer, job_id, undisturbed)

    assert heir.stop() == 0
    types = types_of(producer, job_id)
    assert "restarted" not in types
    assert types.count("resumed") == (stage not in ("booked", "finalized"))
    check_no_lasting_key(producer)


_IN_THE_PROMPT = """
from headwater.worker.engine.engine import Engine
stop_before(Engine, 'launch', 'in the prompt',
            lambda engine, prefill, decode: any(row.num_computed_tokens for row, _ in prefill))
"""


@pytest.mark.long
@pytest.mark.parametrize("stage", [_IN_THE_PROMPT, STAGES["decode"]], ids=["prompt", "decode"])
def test_each_token_of_a_prompt_is_told_once_whenever_its_worker_is_killed(
    producer: Producer, start_worker: StartWorker, undisturbed: ChoiceResult, stage: str
) -> None:
    """A new worker goes on behind the last position that was told."""
    victim = start_worker("--prefill-chunk", "8", before=stage)
    job_id = producer.submit(job(prompt_logprobs=2))
    victim.wait_for_stage()
    first = next(item for item in producer.tail(job_id) if isinstance(item, Output))
    assert first.prompt is not None
    assert first.prompt.start == 1
    victim.stop(signal.SIGKILL)

    heir = start_worker("--prefill-chunk", "8")
    _check(producer, job_id, undisturbed)
    assert heir.stop() == 0
    assert types_of(producer, job_id).count("resumed") == 1
    deltas = [entry.event for entry in entries_of(producer, job_id)]
    parts = [part for event in deltas if isinstance(event, Delta) for part in event.parts]
    told = [each.token_id for part in parts if part.prompt for each in part.prompt.logprobs]
    assert tuple(told) == PROMPT[1:]
    starts = [part.prompt.start for part in parts if part.prompt]
    assert starts == sorted(starts)
    result = result_of(producer, job_id)
    assert result.prompt_logprobs is not None
    assert [len(each.top) for each in result.prompt_logprobs] == [2] * len(told)
    check_no_lasting_key(producer)


@pytest.mark.parametrize("stage", _stages("decode", "finalizing"))
def test_a_zombie_that_comes_back_writes_nothing_more(
    producer: Producer, start_worker: StartWorker, undisturbed: ChoiceResult, stage: str
) -> None:
    zombie = start_worker(before=STAGES[stage])
    heir = start_worker(before="")
    heir.send(signal.SIGSTOP)
    job_id = producer.submit(job())
    zombie.wait_for_stage()
    zombie.send(signal.SIGSTOP)
    heir.send(signal.SIGCONT)
    _check(producer, job_id, undisturbed)
    before = types_of(producer, job_id)

    zombie.send(signal.SIGCONT)
    zombie.go_on()
    # It works again, and is asked for a second job by its own.
    assert heir.stop() == 0
    again = producer.submit(job())
    _check(producer, again, undisturbed)

    assert zombie.stop() == 0
    assert types_of(producer, job_id) == before
    check_no_lasting_key(producer)


@pytest.mark.parametrize("stage", _stages("claimed", "decode"))
def test_a_worker_that_is_told_to_end_hands_back_where_it_stands(
    producer: Producer, start_worker: StartWorker, undisturbed: ChoiceResult, stage: str
) -> None:
    first = start_worker("--drain-s", "0", before=STAGES[stage])
    job_id = producer.submit(job())
    first.wait_for_stage()

    first.send(signal.SIGTERM)
    first.go_on()
    assert first.wait() == 0
    heir = start_worker()
    _check(producer, job_id, undisturbed)

    assert heir.stop() == 0
    assert "restarted" not in types_of(producer, job_id)
    check_no_lasting_key(producer)


def test_a_second_signal_ends_the_drain(
    producer: Producer, start_worker: StartWorker, undisturbed: ChoiceResult
) -> None:
    first = start_worker("--drain-s", "600", before=STAGES["decode"])
    job_id = producer.submit(job(max_tokens=4000))
    first.wait_for_stage()

    first.send(signal.SIGTERM)
    first.send(signal.SIGINT)
    first.go_on()

    assert first.wait() == 0
    assert types_of(producer, job_id)[-1] == "released"
    output = result_after_cancel(producer, job_id)
    assert output[:5] == undisturbed.token_ids[:5]


def result_after_cancel(producer: Producer, job_id: str) -> tuple[int, ...]:
    producer.cancel(job_id)
    return result_of(producer, job_id).choices[0].token_ids
