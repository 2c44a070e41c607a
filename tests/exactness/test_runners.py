"""Every runner gives what the prompt alone gives, whatever runs beside it."""

import random

import pytest
from headwater.worker.engine.merged_runner import MergedRunner
from headwater.worker.engine.row_runner import RowRunner

from tests.exactness.reference import ExactnessReport
from tests.exactness.workload import Workload, random_prompts, sequence
from tests.tiny_models import TINY_FAMILIES, tiny_model

RUNNERS = [RowRunner, MergedRunner]
PROMISED = list(TINY_FAMILIES)[:5]


@pytest.mark.parametrize("runner_class", RUNNERS)
@pytest.mark.parametrize("family", TINY_FAMILIES)
def test_greedy_tokens_of_every_row_are_those_of_its_prompt_alone(family, runner_class) -> None:
    is_promised_and_fast = runner_class is MergedRunner and family in PROMISED
    check_workloads(family, runner_class, range(10 if is_promised_and_fast else 3))


@pytest.mark.long
@pytest.mark.parametrize("runner_class", RUNNERS)
@pytest.mark.parametrize("family", TINY_FAMILIES)
def test_greedy_tokens_are_exact_over_a_hundred_workloads(family, runner_class) -> None:
    check_workloads(family, runner_class, range(10, 110))


def check_workloads(family, runner_class, seeds) -> None:
    model = tiny_model(family)
    report = ExactnessReport()
    for seed in seeds:
        rng = random.Random(seed)
        pending = [sequence(prompt, rng.randint(1, 16)) for prompt in random_prompts(rng, 8)]
        runner = runner_class(model)
        ended = Workload(runner, rng, list(pending)).run()

        assert len(ended) == len(pending)
        assert runner.nbytes == 0
        for row in ended:
            report.compare(model, row.job.prompt_token_ids, row.output_token_ids, f"seed {seed}")
    report.check()
