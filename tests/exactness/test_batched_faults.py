"""Faults of other engines' batching and prefix caches, each as the case that showed it."""

import random

import mlx.core as mx
import pytest
from headwater.worker.engine.engine import Engine
from headwater.worker.engine.merged_runner import MergedRunner
from headwater.worker.engine.row_runner import RowRunner
from headwater.worker.engine.sampler import Sampler
from headwater.worker.sequence import ScheduledSequence

from tests.exactness.reference import ExactnessReport, assert_logits_close, logits_alone
from tests.exactness.workload import sequence
from tests.tiny_models import TINY_FAMILIES, VOCABULARY_SIZE, WINDOW, tiny_model

RUNNERS = [RowRunner, MergedRunner]


def prompts_of(*lengths: int, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(VOCABULARY_SIZE) for _ in range(length)] for length in lengths]


def prefilled(runner, prompts):
    rows = [sequence(prompt) for prompt in prompts]
    for row, prompt in zip(rows, prompts, strict=True):
        runner.attach(row, ())
        runner.prefill([row], [prompt])
    return rows


def teacher_forced(runner, rows, columns) -> list[mx.array]:
    """Decode given tokens, one list a step; return each step's logits."""
    return [runner.decode(rows, mx.array(column)) for column in columns]


@pytest.mark.parametrize("lengths", [(19, 3, 11), (WINDOW - 3, 20), (1, WINDOW, WINDOW + 1, 40)])
@pytest.mark.parametrize("family", TINY_FAMILIES)
def test_ragged_rows_below_and_above_the_window_decode_as_alone(family, lengths) -> None:
    model = tiny_model(family)
    runner = MergedRunner(model)
    prompts = prompts_of(*lengths)
    rows = prefilled(runner, prompts)
    given = prompts_of(*[WINDOW + 4] * len(lengths), seed=1)

    steps = teacher_forced(runner, rows, zip(*given, strict=True))

    for index, prompt in enumerate(prompts):
        expected = logits_alone(model, [*prompt, *given[index]])[len(prompt) :]
        assert_logits_close(mx.stack([logits[index] for logits in steps]), expected)


@pytest.mark.parametrize("family", TINY_FAMILIES)
def test_a_neighbours_content_does_not_change_a_row_bit_for_bit(family) -> None:
    model = tiny_model(family)
    own, *_ = prompts_of(11)
    results = []
    for seed in (1, 2):
        runner = MergedRunner(model)
        rows = prefilled(runner, [own, *prompts_of(19, 3, seed=seed)])
        given = prompts_of(3, 3, 3, seed=seed)
        given[0] = [5, 6, 7]
        steps = teacher_forced(runner, rows, zip(*given, strict=True))
        results.append(mx.stack([logits[0] for logits in steps]))

    assert mx.array_equal(*results)


@pytest.mark.parametrize("family", TINY_FAMILIES)
def test_a_rows_place_in_the_batch_does_not_change_it_bit_for_bit(family) -> None:
    model = tiny_model(family)
    prompts = prompts_of(11, 19, 3)
    results = []
    for order in ((0, 1, 2), (2, 0, 1), (1, 2, 0)):
        runner = MergedRunner(model)
        rows = prefilled(runner, [prompts[index] for index in order])
        logits = runner.decode(rows, mx.array([index + 1 for index in order]))
        results.append(logits[order.index(0)])

    assert mx.array_equal(results[0], results[1])
    assert mx.array_equal(results[0], results[2])


@pytest.mark.parametrize("family", TINY_FAMILIES)
def test_a_row_of_nan_leaves_its_neighbours_as_they_are(family) -> None:
    model = tiny_model(family)
    prompts = prompts_of(19, 3, 11)
    clean = MergedRunner(model)
    expected = clean.decode(prefilled(clean, prompts), mx.array([1, 2, 3]))
    poisoned = MergedRunner(model)
    rows = prefilled(poisoned, prompts)
    for cache in poisoned._single[rows[1]].caches:
        arrays = cache.state if hasattr(cache, "offset") else cache.cache
        for array in arrays:
            if isinstance(array, mx.array):
                array[:] = float("nan")

    logits = poisoned.decode(rows, mx.array([1, 2, 3]))

    assert mx.all(mx.isnan(logits[1]))
    for index in (0, 2):
        assert mx.array_equal(logits[index], expected[index])


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_next", "mamba2"])
def test_sixteen_recurrent_rows_at_once_do_not_see_each_other(family) -> None:
    model = tiny_model(family)
    runner = MergedRunner(model)
    prompts = prompts_of(*range(2, 34, 2))
    rows = prefilled(runner, prompts)
    given = prompts_of(*[6] * 16, seed=1)

    steps = teacher_forced(runner, rows, zip(*given, strict=True))

    for index, prompt in enumerate(prompts):
        expected = logits_alone(model, [*prompt, *given[index]])[len(prompt) :]
        assert_logits_close(mx.stack([logits[index] for logits in steps]), expected)


@pytest.mark.parametrize("runner_class", RUNNERS)
@pytest.mark.parametrize("family", TINY_FAMILIES)
def test_a_prompt_is_the_same_cold_warm_and_after_its_own_continuation(
    family, runner_class
) -> None:
    model = tiny_model(family)
    engine = Engine(runner_class(model), Sampler(VOCABULARY_SIZE, ()))
    (prompt,) = prompts_of(20)
    cold = run_greedily(engine, prompt, [], stop_before_last=True)
    # A full hit still leaves the last token of the prompt to compute.
    warm = run_greedily(engine, prompt, [cold.stored])
    again = run_greedily(engine, prompt, [cold.stored])
    chat = [*prompt, *cold.output, 9]
    continued = run_greedily(engine, chat, [cold.stored_with_output])

    report = ExactnessReport()
    for tokens, result in ((prompt, cold), (prompt, again), (chat, continued)):
        report.compare(model, tokens, result.output)
    report.check()
    assert warm.output == cold.output
    assert again.output == warm.output


class Greedy:
    """What a lone run left behind."""

    output: list[int]
    stored = None
    stored_with_output = None


def run_greedily(engine: Engine, prompt, prefix, stop_before_last: bool = False) -> Greedy:
    """Generate 6 tokens; store the prompt but its last token, and all that was computed."""
    result = Greedy()
    row = sequence(prompt, 6)
    engine.attach(row, prefix)
    if stop_before_last:
        engine.launch([ScheduledSequence(row, row.num_pending_tokens - 1)], []).read()
        result.stored = engine.extract(row, 0, len(prompt) - 1)
    engine.launch([ScheduledSequence(row, row.num_pending_tokens)], []).read()
    while row.num_remaining_tokens:
        engine.launch([], [row]).read()
    result.stored_with_output = engine.extract(row, 0, row.num_computed_tokens)
    engine.detach(row)
    result.output = row.output_token_ids
    return result
