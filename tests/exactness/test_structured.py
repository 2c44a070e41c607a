"""Outputs under random schemas: whole ones validate, cut ones can still be completed."""

import json
import random
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any

import pytest
from headwater.schemas import (
    Channel,
    ChoiceFormat,
    DeltaPart,
    Finished,
    FinishReason,
    GenerationJob,
    JsonObjectFormat,
    JsonSchemaFormat,
    RegexFormat,
    SamplingParams,
)
from headwater.schemas.grammar import grammar_text, start_matcher
from headwater.worker.assembly import LoopSettings, build_loop
from headwater.worker.engine.loading import LoadedModel, load_model
from headwater.worker.engine.parity import choose_runner
from headwater.worker.engine.random_model import write_random_model
from headwater.worker.engine.runner import ModelRunner
from headwater.worker.engine.sampler import SAMPLER_VERSION
from headwater.worker.loop import GenerationLoop
from headwater.worker.messages import Claim
from headwater.worker.metrics import WorkerMetrics
from headwater.worker.text.token_bytes import bytes_function
from jsonschema import Draft202012Validator
from llguidance import LLTokenizer

from tests.exactness.random_schemas import random_schema
from tests.worker.loop_bench import ListSink

MAX_TOKENS = 64


class Lab:
    """A model and loops over it, one after the other."""

    def __init__(self, source: str) -> None:
        self.model: LoadedModel = load_model(source)
        self.metrics = WorkerMetrics()
        self._runner: ModelRunner = choose_runner(self.model.model, self.model.vocab_size)

    def run(
        self,
        jobs: Iterable[GenerationJob],
        history: dict[str, tuple[DeltaPart, ...]] | None = None,
        *,
        alter: Callable[[GenerationLoop], None] = lambda loop: None,
        **settings: Any,
    ) -> ListSink:
        """Run *jobs* beside each other to their ends."""
        sink = ListSink()
        self.metrics = WorkerMetrics()
        loop = build_loop(
            self.model,
            LoopSettings(alias="m", **settings),
            sink,
            self.metrics,
            runner=self._runner,
        )
        alter(loop)
        for job in jobs:
            parts = (history or {}).get(job.job_id, ())
            loop.admit(
                Claim(
                    job=job,
                    queue_name="q",
                    execution_id="e",
                    attempt=1,
                    history=parts,
                    sampler_version=SAMPLER_VERSION if parts else None,
                )
            )
        while not loop.is_idle:
            loop.step()
        return sink


@pytest.fixture(scope="module")
def random_lab(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    """Random weights over single bytes: characters straddle tokens."""
    folder = write_random_model(tmp_path_factory.mktemp("random"))
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    # The text stage's self-check wants a word; UTF-8 has no byte 0xC0.
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["ab"] = vocabulary.pop("\u00c0")
    path.write_text(json.dumps(tokenizer))
    return Lab(str(folder))


@cache
def demo_lab() -> Lab:
    return Lab("demo")


def job(seed: int, **fields: Any) -> GenerationJob:
    rng = random.Random(seed)
    values = {
        "response_format": JsonSchemaFormat(json_schema=random_schema(rng)),
        "sampling": SamplingParams(temperature=rng.choice([0.0, 1.0]), seed=seed),
        "max_tokens": MAX_TOKENS,
    }
    prompt = tuple(rng.randrange(256) for _ in range(rng.randint(1, 12)))
    return GenerationJob(job_id=str(seed), model="m", prompt_token_ids=prompt, **(values | fields))


def check_output(job: GenerationJob, sink: ListSink) -> FinishReason:
    """Check one output, and return how it ended."""
    end = sink.ends[job.job_id]
    assert isinstance(end, Finished), end
    text = sink.text(job.job_id)
    reason = end.choices[0].finish_reason
    if reason is FinishReason.STOP:
        schema = job.response_format.json_schema
        validator = Draft202012Validator(schema, format_checker=Draft202012Validator.FORMAT_CHECKER)
        validator.validate(json.loads(text))
    else:
        assert len(sink.tokens(job.job_id)) == job.max_tokens
    return reason


def check_prefix(lab: Lab, job: GenerationJob, sink: ListSink) -> None:
    """Check by a matcher of bytes that the output's bytes keep to the grammar."""
    bytes_of = bytes_function({"type": "ByteLevel"})
    output = [t for t in sink.tokens(job.job_id) if t not in lab.model.eos_token_ids]
    data = list(b"".join(bytes_of(lab.model.tokenizer.id_to_token(token)) for token in output))
    matcher = start_matcher(grammar_text(job.response_format), LLTokenizer("byte"))
    assert matcher.try_consume_tokens(data) == len(data)


def check_schemas(lab: Lab, seeds: Sequence[int]) -> None:
    jobs = [job(seed) for seed in seeds]
    sink = lab.run(jobs, max_batch=32)
    reasons = set()
    for each in jobs:
        reasons.add(check_output(each, sink))
        check_prefix(lab, each, sink)
    assert reasons == {FinishReason.STOP, FinishReason.LENGTH}


def test_random_weights_keep_to_25_random_schemas(random_lab: Lab) -> None:
    check_schemas(random_lab, range(25))


def test_the_demo_model_keeps_to_25_random_schemas() -> None:
    check_schemas(demo_lab(), range(25))


@pytest.mark.long
def test_random_weights_keep_to_500_random_schemas(random_lab: Lab) -> None:
    check_schemas(random_lab, range(500))


@pytest.mark.long
def test_the_demo_model_keeps_to_500_random_schemas() -> None:
    check_schemas(demo_lab(), range(500))


@pytest.mark.parametrize("pipelined", [False, True])
def test_an_output_is_the_same_alone_and_among_rows_of_all_kinds(
    random_lab: Lab, pipelined: bool
) -> None:
    def alter(loop: GenerationLoop) -> None:
        loop._pipelined = pipelined

    jobs = [job(seed) for seed in range(8)]
    free = [job(seed, response_format=None) for seed in range(100, 106)]
    together = random_lab.run([*jobs, *free], alter=alter, max_batch=9)
    for each in [*jobs, *free]:
        alone = random_lab.run([each])
        assert together.tokens(each.job_id) == alone.tokens(each.job_id)
        assert together.ends[each.job_id].choices == alone.ends[each.job_id].choices


def test_a_resumed_output_goes_on_where_it_was(random_lab: Lab) -> None:
    jobs = [job(seed) for seed in range(12)]
    whole = random_lab.run(jobs)
    history = {}
    for each in jobs:
        parts = whole.parts[each.job_id]
        history[each.job_id] = tuple(parts[: len(parts) // 2])
    rest = random_lab.run(jobs, history)

    assert rest.restarted == []
    for each in jobs:
        told = [token for part in history[each.job_id] for token in part.token_ids]
        assert told + rest.tokens(each.job_id) == whole.tokens(each.job_id)


def test_an_output_that_ended_just_before_its_worker_died_is_not_restarted(random_lab: Lab) -> None:
    short = JsonSchemaFormat(json_schema={"enum": [1, 22]})
    each = job(1, response_format=short)
    whole = random_lab.run([each])
    again = random_lab.run([each], {each.job_id: tuple(whole.parts[each.job_id])})

    assert again.restarted == []
    assert again.ends[each.job_id].choices == whole.ends[each.job_id].choices


def test_published_tokens_that_break_the_format_are_restarted(random_lab: Lab) -> None:
    each = job(1, response_format=JsonObjectFormat(), max_tokens=8)
    sink = random_lab.run([each.model_copy(update={"response_format": None})])
    again = random_lab.run([each], {each.job_id: tuple(sink.parts[each.job_id][:2])})

    assert again.restarted == [each.job_id]
    assert again.text(each.job_id).startswith("{")


def test_preempted_rows_keep_to_their_formats(random_lab: Lab) -> None:
    long = RegexFormat(regex="([a-f]{3}[0-9]){100}")
    jobs = [job(seed, max_tokens=200, response_format=long) for seed in range(12)]
    tight = random_lab.run(jobs, kv_budget_bytes=400_000)
    num_preempted = random_lab.metrics.registry.get_sample_value("headwater_preemptions_total")
    ample = random_lab.run(jobs)
    assert num_preempted
    assert all(tight.tokens(each.job_id) == ample.tokens(each.job_id) for each in jobs)


def test_choices_of_one_job_follow_its_format_each_for_itself(random_lab: Lab) -> None:
    schema = {"type": "array", "items": {"type": "integer", "maximum": 99, "minimum": 10}}
    schema |= {"minItems": 3, "maxItems": 3}
    each = job(
        5,
        response_format=JsonSchemaFormat(json_schema=schema),
        sampling=SamplingParams(temperature=1.0, seed=2, n=4),
    )
    sink = random_lab.run([each])
    texts = {}
    for part in sink.parts[each.job_id]:
        text = "".join(span.text for span in part.text)
        texts[part.choice] = texts.get(part.choice, "") + text
    assert len(set(texts.values())) > 1
    for text in texts.values():
        Draft202012Validator(schema).validate(json.loads(text))


def test_markers_in_an_enforced_text_are_content(random_lab: Lab) -> None:
    texts = ChoiceFormat(choices=("a<think>no</think>yes",))
    # Without the bias the model may begin to reason, which it may do before the format.
    begin = random_lab.model.tokenizer.token_to_id("a")
    assert begin is not None
    each = job(1, response_format=texts, sampling=SamplingParams(logit_bias={begin: 50.0}))
    sink = random_lab.run([each], reasoning="think")
    assert sink.text(each.job_id) == "a<think>no</think>yes"
    spans = [span for part in sink.parts[each.job_id] for span in part.text]
    assert {span.channel for span in spans} == {Channel.CONTENT}


def test_a_ban_that_leaves_a_grammar_nothing_fails_the_job_alone(random_lab: Lab) -> None:
    brace = random_lab.model.tokenizer.token_to_id("{")
    sampling = SamplingParams(bad_token_ids=(brace,))
    bad = job(1, response_format=JsonObjectFormat(), sampling=sampling)
    good = job(2)
    sink = random_lab.run([bad, good])
    assert sink.ends[bad.job_id].code == "no_token_allowed"
    check_output(good, sink)


def test_a_format_that_cannot_be_enforced_fails_at_once(random_lab: Lab) -> None:
    impossible = JsonSchemaFormat(json_schema={"type": "object", "uniqueItems": True})
    bad = job(1, response_format=impossible)
    good = job(2)
    sink = random_lab.run([bad, good])
    assert sink.ends[bad.job_id].code == "bad_response_format"
    check_output(good, sink)


def test_most_of_the_random_schemas_refuse_what_is_no_effort_of_theirs() -> None:
    schemas = [random_schema(random.Random(seed)) for seed in range(200)]
    refusing = [s for s in schemas if not Draft202012Validator(s).is_valid({"other": 1})]
    assert len(refusing) > 150
