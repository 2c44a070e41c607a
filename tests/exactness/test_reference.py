"""The yardstick itself: it accepts what is right, and near ties only as far as they go."""

import mlx.core as mx
import pytest
from headwater.schemas import SamplingParams

from tests.exactness.reference import ExactnessReport, greedy_alone
from tests.exactness.workload import sequence
from tests.tiny_models import VOCABULARY_SIZE, tiny_model

PROMPT = [5, 17, 99]


class FixedModel:
    """Gives the same logits after every token."""

    def __init__(self, **logits: float) -> None:
        row = mx.zeros((VOCABULARY_SIZE,))
        for token, value in logits.items():
            row[int(token[1:])] = value
        self.row = row

    def __call__(self, inputs, cache=None):
        return mx.broadcast_to(self.row, (*inputs.shape, VOCABULARY_SIZE))


def test_one_forward_over_the_output_finds_what_a_forward_for_every_token_gives() -> None:
    model = tiny_model("llama")
    output = greedy_alone(model, PROMPT, 12)
    report = ExactnessReport()
    report.compare(model, PROMPT, output)
    report.check()
    assert report.near_ties == []


@pytest.mark.parametrize("step", [0, 5, 11])
def test_a_wrong_token_anywhere_is_a_failure(step) -> None:
    model = tiny_model("llama")
    output = greedy_alone(model, PROMPT, 12)
    output[step] = (output[step] + 1) % VOCABULARY_SIZE
    report = ExactnessReport()
    report.compare(model, PROMPT, output)
    with pytest.raises(AssertionError, match=f"step {step}"):
        report.check()


def test_the_second_of_two_nearly_equal_logits_is_a_near_tie_and_the_third_is_not() -> None:
    model = FixedModel(t3=9.0, t4=8.9995, t5=8.9994)
    report = ExactnessReport()
    report.compare(model, PROMPT, [3, 4, 77])
    assert (len(report.near_ties), report.failures) == (1, [])
    report.compare(model, PROMPT, [3, 5])
    assert len(report.failures) == 1


def test_more_near_ties_than_one_row_in_two_hundred_fail() -> None:
    report = ExactnessReport()
    for _ in range(2):
        report.compare(FixedModel(t3=9.0, t4=8.9995), PROMPT, [4])
    with pytest.raises(AssertionError):
        report.check()


def test_a_drawn_row_is_compared_at_every_step() -> None:
    row = sequence(PROMPT, 4, sampling=SamplingParams(temperature=1.0, seed=3))
    row.output_token_ids = [3, 3, 3, 4]
    report = ExactnessReport()
    report.compare_drawn(FixedModel(t3=80.0), row)
    assert "step 3" in report.failures[0]
