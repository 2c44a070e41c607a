"""Steps over rows: counts, inputs that nobody has read yet, and rows that fail alone."""

import mlx.core as mx
import pytest
from headwater.worker.engine.engine import Engine, NonFiniteLogits
from headwater.worker.engine.merged_runner import MergedRunner
from headwater.worker.engine.row_runner import RowRunner
from headwater.worker.engine.sampler import Sampler
from headwater.worker.errors import EngineUnsound
from headwater.worker.sequence import ScheduledSequence, SequenceStatus

from tests.exactness.reference import greedy_alone
from tests.exactness.workload import sequence
from tests.tiny_models import VOCABULARY_SIZE, tiny_model

RUNNERS = [RowRunner, MergedRunner]
PROMPTS = [[5, 17, 99, 3, 64], [8, 1], [77, 30, 30, 12, 9, 50, 41]]
POISON = 66


class PoisonedModel:
    """A model that raises for a batch that holds the poisoned token, half-way through."""

    def __init__(self, family: str = "llama") -> None:
        self.inner = tiny_model(family)
        self.is_broken = False

    @property
    def layers(self):
        return self.inner.layers

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def __call__(self, inputs, cache=None):
        logits = self.inner(inputs, cache=cache)
        if self.is_broken or POISON in inputs.tolist()[0] or [POISON] in inputs.tolist():
            raise ValueError("poison")
        return logits


@pytest.fixture(scope="module")
def model():
    return tiny_model("llama")


def engine_of(model, runner_class=MergedRunner) -> Engine:
    return Engine(runner_class(model), Sampler(VOCABULARY_SIZE, ()))


def attached(engine: Engine, prompts=PROMPTS, max_tokens: int = 8):
    rows = [sequence(prompt, max_tokens) for prompt in prompts]
    for row in rows:
        engine.attach(row)
        row.status = SequenceStatus.RUNNING
    return rows


def whole(rows):
    return [ScheduledSequence(row, row.num_pending_tokens) for row in rows]


def generate(engine: Engine, rows, num_steps: int) -> None:
    """Decode pipelined: each step is launched before the last one is read."""
    in_flight = None
    for _ in range(num_steps):
        previous, in_flight = in_flight, engine.launch([], rows)
        if previous is not None:
            previous.read()
    if in_flight is not None:
        in_flight.read()


@pytest.mark.parametrize("runner_class", RUNNERS)
def test_pipelined_decoding_gives_the_tokens_of_the_prompt_alone(model, runner_class) -> None:
    engine = engine_of(model, runner_class)
    rows = attached(engine)

    engine.launch(whole(rows), []).read()
    generate(engine, rows, 7)

    assert [row.output_token_ids for row in rows] == [greedy_alone(model, p, 8) for p in PROMPTS]


def test_counts_follow_the_launch_and_the_reading(model) -> None:
    engine = engine_of(model)
    (row,) = attached(engine, PROMPTS[:1])

    step = engine.launch([ScheduledSequence(row, 3)], [])
    assert (row.num_computed_tokens, row.num_unread_tokens) == (3, 0)
    assert step.read().outputs == []
    step = engine.launch([ScheduledSequence(row, 2)], [])
    assert (row.num_computed_tokens, row.num_unread_tokens) == (5, 1)
    following = engine.launch([], [row])
    assert (row.num_computed_tokens, row.num_unread_tokens) == (6, 2)
    (output,) = step.read().outputs
    assert (row.num_unread_tokens, row.output_token_ids) == (1, [output.token_id])
    following.read()
    assert (row.num_unread_tokens, row.num_pending_tokens) == (0, 1)


def test_attaching_a_prefix_counts_it_as_computed_and_cached(model) -> None:
    engine = engine_of(model)
    first, second = attached(engine, [PROMPTS[0], PROMPTS[0]])
    engine.launch(whole([first]), []).read()
    prefix = [engine.extract(first, 0, 3), engine.extract(first, 3, 4)]

    engine.attach(second, prefix)

    assert (second.num_cached_tokens, second.num_computed_tokens) == (4, 4)


def test_a_step_mixes_read_and_unread_inputs_in_any_order(model) -> None:
    engine = engine_of(model)
    first, second, third = attached(engine)
    engine.launch(whole([first, second]), []).read()
    pending = engine.launch(whole([third]), [second])
    following = engine.launch([], [third, first, second])
    pending.read()
    following.read()

    rows = zip((first, second, third), PROMPTS, strict=True)
    for row, prompt in rows:
        assert row.output_token_ids == greedy_alone(model, prompt, len(row.output_token_ids))
    assert [len(row.output_token_ids) for row in (first, second, third)] == [2, 3, 2]


@pytest.mark.parametrize("runner_class", RUNNERS)
def test_a_row_can_be_detached_while_a_launched_step_still_reads_it(model, runner_class) -> None:
    engine = engine_of(model, runner_class)
    rows = attached(engine)
    engine.launch(whole(rows), []).read()
    step = engine.launch([], rows)
    engine.detach(rows[0])
    rows[0].status = SequenceStatus.FINISHED

    outputs = step.read().outputs
    generate(engine, rows[1:], 2)

    assert [output.sequence for output in outputs] == rows[1:]
    assert len(rows[0].output_token_ids) == 1
    assert [row.output_token_ids for row in rows[1:]] == [
        greedy_alone(model, prompt, 4) for prompt in PROMPTS[1:]
    ]


@pytest.mark.parametrize("runner_class", RUNNERS)
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "qwen3_5"])
def test_a_row_that_raises_in_prefill_fails_alone(family, runner_class) -> None:
    model = PoisonedModel(family)
    engine = engine_of(model, runner_class)
    good, late = attached(engine, PROMPTS[:2])
    engine.launch(whole([good]), []).read()
    (bad,) = attached(engine, [[4, POISON, 9]])

    step = engine.launch(whole([bad, late]), [good])
    result = step.read()

    assert [(failed.sequence, str(failed.error)) for failed in result.failed] == [(bad, "poison")]
    assert step.failed_sequences == {bad}
    generate(engine, [good, late], 3)
    assert good.output_token_ids == greedy_alone(model.inner, PROMPTS[0], 5)
    assert late.output_token_ids == greedy_alone(model.inner, PROMPTS[1], 4)


@pytest.mark.parametrize("runner_class", RUNNERS)
def test_a_row_that_raises_in_decode_fails_alone_even_before_its_token_was_read(
    runner_class,
) -> None:
    model = PoisonedModel()
    engine = engine_of(model, runner_class)
    rows = attached(engine)
    unread = engine.launch(whole(rows), [])
    unread.tokens = mx.where(mx.array([False, True, False]), POISON, unread.tokens)

    step = engine.launch([], rows)
    unread.read()
    result = step.read()

    assert [failed.sequence for failed in result.failed] == [rows[1]]
    for index in (0, 2):
        assert rows[index].output_token_ids == greedy_alone(model.inner, PROMPTS[index], 2)


@pytest.mark.parametrize("runner_class", RUNNERS)
def test_a_failed_row_is_passed_over_until_its_failure_has_been_read(runner_class) -> None:
    model = PoisonedModel()
    engine = engine_of(model, runner_class)
    good, bad = attached(engine, [PROMPTS[0], [4, POISON]])
    first = engine.launch(whole([good, bad]), [])
    assert engine.has_failed(bad)

    # The scheduler does not know yet, and plans the row once more.
    second = engine.launch(whole([bad]), [good])

    assert [failed.sequence for failed in first.read().failed] == [bad]
    assert second.read().failed == []
    assert good.output_token_ids == greedy_alone(model.inner, PROMPTS[0], 2)
    engine.detach(bad)
    assert not engine.has_failed(bad)


def test_when_no_row_can_be_computed_the_engine_says_that_it_is_unsound() -> None:
    model = PoisonedModel()
    engine = engine_of(model)
    rows = attached(engine)
    model.is_broken = True

    with pytest.raises(EngineUnsound, match="poison"):
        engine.launch(whole(rows), [])


def test_a_lone_row_that_raises_is_not_taken_for_a_broken_engine() -> None:
    engine = engine_of(PoisonedModel())
    (bad,) = attached(engine, [[POISON]])

    assert [failed.sequence for failed in engine.launch(whole([bad]), []).read().failed] == [bad]


def test_a_row_with_non_finite_logits_fails_alone(model) -> None:
    model = tiny_model("llama")
    weight = mx.array(model.model.embed_tokens.weight)
    weight[POISON] = float("nan")
    model.model.embed_tokens.weight = weight
    engine = engine_of(model)
    rows = attached(engine, [PROMPTS[0], [3, POISON], PROMPTS[1]])

    step = engine.launch(whole(rows), [])
    following = engine.launch([], rows)
    result = step.read()

    (failed,) = result.failed
    assert failed.sequence is rows[1]
    rows[1].status = SequenceStatus.FINISHED
    assert [output.sequence for output in following.read().outputs] == [rows[0], rows[2]]
    assert isinstance(failed.error, NonFiniteLogits)
    assert rows[1].output_token_ids == []
    assert rows[0].output_token_ids == greedy_alone(model, PROMPTS[0], 2)
    assert rows[2].output_token_ids == greedy_alone(model, PROMPTS[1], 2)


def test_a_step_is_read_once(model) -> None:
    engine = engine_of(model)
    step = engine.launch(whole(attached(engine)), [])
    step.read()
    with pytest.raises(ValueError, match="has been read"):
        step.read()


@pytest.mark.parametrize("runner_class", RUNNERS)
def test_bytes_return_to_zero_when_every_row_has_left(model, runner_class) -> None:
    engine = engine_of(model, runner_class)
    rows = attached(engine)
    engine.launch(whole(rows), []).read()
    generate(engine, rows, 2)
    assert engine.nbytes > 0

    for row in rows:
        engine.detach(row)
        engine.detach(row)

    assert engine.nbytes == 0
