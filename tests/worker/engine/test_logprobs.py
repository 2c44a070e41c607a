"""Logprobs: the model's own, of the rows that ask, alone and in any batch."""

import mlx.core as mx
import numpy as np
import pytest
from headwater.schemas import SamplingParams
from headwater.worker.engine.engine import Engine
from headwater.worker.engine.logprobs import LogprobBlock
from headwater.worker.engine.merged_runner import MergedRunner
from headwater.worker.engine.sampler import Sampler
from headwater.worker.sequence import ScheduledSequence, SequenceStatus

from tests.exactness.reference import logits_alone
from tests.exactness.workload import sequence
from tests.tiny_models import VOCABULARY_SIZE, tiny_model
from tests.worker.engine.test_engine import PoisonedModel

LOUD = SamplingParams(temperature=1.5, seed=4, repetition_penalty=1.9, logit_bias={5: 9.0})
JOBS = [
    {"logprobs": 3},
    {"logprobs": None},
    {"logprobs": 0, "sampling": LOUD},
    {"logprobs": 20, "sampling": LOUD},
]
PROMPTS = [[5, 17, 99, 3, 64], [8, 1], [77, 30, 30, 12, 9, 50, 41], [8, 8]]


def run(model, rows, num_steps: int = 6) -> dict:
    """Decode pipelined; return each row's logprobs."""
    engine = Engine(MergedRunner(model), Sampler(VOCABULARY_SIZE, ()))
    found = {row: [] for row in rows}
    for row in rows:
        engine.attach(row)
        row.status = SequenceStatus.RUNNING
    step = engine.launch([ScheduledSequence(row, row.num_pending_tokens) for row in rows], [])
    for _ in range(num_steps):
        step, due = engine.launch([], rows), step
        for output in due.read().outputs:
            found[output.sequence].append(output.logprobs)
    return found


def test_each_row_gets_the_logprobs_of_its_prompt_alone() -> None:
    model = tiny_model("llama")
    rows = [sequence(prompt, 20, **job) for prompt, job in zip(PROMPTS, JOBS, strict=True)]
    found = run(model, rows)

    assert found[rows[1]] == [None] * 6
    for row in (rows[0], rows[2], rows[3]):
        prompt = row.job.prompt_token_ids
        logits = logits_alone(model, [*prompt, *row.output_token_ids])[len(prompt) - 1 : -1]
        expected = np.array(logits - mx.logsumexp(logits, axis=-1, keepdims=True))
        for values, token, got in zip(expected, row.output_token_ids, found[row], strict=True):
            assert got.logprob == pytest.approx(values[token], abs=1e-3)
            assert len(got.top_ids) == row.job.logprobs
            assert got.top_ids == np.argsort(-values, kind="stable")[: row.job.logprobs].tolist()
            assert got.top_logprobs == pytest.approx(values[got.top_ids].tolist(), abs=1e-3)


def test_a_greedy_token_is_the_likeliest_of_its_alternatives() -> None:
    row = sequence(PROMPTS[0], 20, logprobs=1)
    (found,) = run(tiny_model("llama"), [row]).values()
    assert [each.top_ids for each in found] == [[token] for token in row.output_token_ids]
    assert [each.top_logprobs for each in found] == [[each.logprob] for each in found]


def test_nobody_who_asks_for_none_pays_for_any() -> None:
    logits = mx.zeros((2, VOCABULARY_SIZE))
    assert LogprobBlock.of(logits, mx.array([1, 2]), [sequence([1]), sequence([2])]) is None


def test_more_alternatives_than_the_vocabulary_are_the_vocabulary() -> None:
    row = sequence([1], logprobs=20)
    block = LogprobBlock.of(mx.array([[0.0, 2.0, 1.0]]), mx.array([2]), [row])
    assert block.read()[row].top_ids == [1, 2, 0]


def test_a_token_without_any_probability_has_minus_infinity() -> None:
    row = sequence([1], logprobs=3)
    block = LogprobBlock.of(mx.array([[0.0, -mx.inf, 0.0]]), mx.array([1]), [row])
    found = block.read()[row]
    assert found.logprob == -np.inf
    assert found.top_logprobs[-1] == -np.inf


def test_rows_that_are_computed_apart_after_a_failure_keep_their_logprobs() -> None:
    model = PoisonedModel()
    good, bad, other = (
        sequence(prompt, 8, logprobs=2) for prompt in ([5, 17], [3, 66, 4], [9, 9, 9])
    )
    rows = [good, bad, other]
    engine = Engine(MergedRunner(model), Sampler(VOCABULARY_SIZE, ()))
    for row in rows:
        engine.attach(row)
        row.status = SequenceStatus.RUNNING
    result = engine.launch(
        [ScheduledSequence(row, row.num_pending_tokens) for row in rows], []
    ).read()

    assert [failed.sequence for failed in result.failed] == [bad]
    assert [output.sequence for output in result.outputs] == [good, other]
    for output in result.outputs:
        assert output.logprobs.top_ids[0] == output.token_id
