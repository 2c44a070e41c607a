"""Everything that jobs can ask for at once, in one batch that they join and leave one by one."""

import random
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
from headwater.schemas import (
    Channel,
    ChoiceFormat,
    Finished,
    FinishReason,
    GenerationJob,
    JobKind,
    JsonSchemaFormat,
    Pooling,
    PositionLogprobs,
    RegexFormat,
    SamplingParams,
    StreamMode,
)
from headwater.worker.assembly import LoopSettings, build_loop
from headwater.worker.engine.merged_runner import MergedRunner
from headwater.worker.engine.runner import ModelRunner
from headwater.worker.engine.shared_kv.runner import SharedPrefixRunner
from headwater.worker.loop import GenerationLoop
from headwater.worker.messages import Claim
from headwater.worker.metrics import WorkerMetrics

from tests.exactness.random_schemas import random_schema
from tests.exactness.test_enforced_replies import TOOLS, marked_lab, named, token
from tests.exactness.test_structured import Lab
from tests.worker.loop_bench import ListSink

NUM_JOBS = 16
NUM_LETTERS = 250
SHARED = tuple(index * 5 % NUM_LETTERS for index in range(40))
RUNNERS: tuple[Callable[[Any], ModelRunner], ...] = (MergedRunner, SharedPrefixRunner)


def a_prompt(draw: random.Random) -> tuple[int, ...]:
    return (*SHARED, *draw.choices(range(NUM_LETTERS), k=draw.randint(1, 20)))


def sampling(lab: Lab, draw: random.Random) -> SamplingParams:
    markers = [token(lab, marker) for marker in ("<think>", "</think>", "<tool_call>")]
    return SamplingParams(
        temperature=draw.choice([0.0, 0.7, 1.3]),
        top_k=draw.choice([0, 5, 40]),
        top_p=draw.choice([1.0, 0.9]),
        min_p=draw.choice([0.0, 0.05]),
        repetition_penalty=draw.choice([1.0, 1.3]),
        presence_penalty=draw.choice([0.0, 0.4]),
        frequency_penalty=draw.choice([0.0, 0.5]),
        logit_bias={draw.randrange(NUM_LETTERS): 2.0} | dict.fromkeys(markers, 3.0),
        bad_token_ids=(NUM_LETTERS + draw.randrange(4),),
        seed=draw.randrange(1000),
        n=draw.choice([1, 1, 2]),
    )


def generation(lab: Lab, job_id: str, draw: random.Random, **fields: Any) -> GenerationJob:
    """Return a job with stops, logprobs, channels and every kind of sampling."""
    letters = draw.sample("etaoinshrdlu .,;", 3)
    values = {
        "prompt_token_ids": a_prompt(draw),
        "sampling": sampling(lab, draw),
        "max_tokens": draw.randint(8, 40),
        "stop": tuple(letters[:2]),
        "include_stop_str": draw.random() < 0.5,
        "logprobs": draw.choice([None, 0, 3]),
        "prompt_logprobs": draw.choice([None, None, 2]),
        "stream": draw.choice(list(StreamMode)),
        "split_channels": draw.random() < 0.8,
    }
    return GenerationJob(job_id=job_id, model="m", **(values | fields))


def formatted(lab: Lab, job_id: str, draw: random.Random) -> GenerationJob:
    response_format = draw.choice(
        [
            JsonSchemaFormat(json_schema=random_schema(draw)),
            JsonSchemaFormat(json_schema=random_schema(draw)),
            RegexFormat(regex="([a-f]{2}[0-9]){1,9}"),
            ChoiceFormat(choices=("yes", "no", "<tool_call>")),
        ]
    )
    return generation(lab, job_id, draw, response_format=response_format, stop=())


def calling(lab: Lab, job_id: str, draw: random.Random) -> GenerationJob:
    choice = draw.choice(["required", named("ab"), "auto"])
    fields = {"tools": TOOLS, "tool_choice": choice, "stop": (), "max_tokens": 90}
    return generation(lab, job_id, draw, split_channels=True, **fields)


def reading(lab: Lab, job_id: str, draw: random.Random) -> GenerationJob:
    fields: dict[str, Any] = {"prompt_token_ids": a_prompt(draw), "max_tokens": 1}
    if draw.random() < 0.5:
        fields |= {"kind": JobKind.EMBEDDING, "pooling": draw.choice(list(Pooling))}
    else:
        texts = [draw.choices(range(NUM_LETTERS), k=draw.randint(1, 6)) for _ in range(3)]
        fields |= {"kind": JobKind.SCORE, "continuations": tuple(map(tuple, texts))}
    return GenerationJob(job_id=job_id, model="m", **fields)


def jobs_of(lab: Lab, seed: int) -> list[GenerationJob]:
    draw = random.Random(seed)
    kinds = [generation, formatted, calling, formatted, generation, reading, calling, generation]
    return [kinds[index % 8](lab, f"j{index}", draw) for index in range(NUM_JOBS)]


def a_loop(lab: Lab, runner: ModelRunner, sink: ListSink) -> GenerationLoop:
    settings = LoopSettings(
        alias="m", max_batch=NUM_JOBS, reasoning="think", tool_parser="json_tools"
    )
    return build_loop(lab.model, settings, sink, WorkerMetrics(), runner=runner)


def admit(loop: GenerationLoop, job: GenerationJob) -> None:
    loop.admit(Claim(job=job, queue_name="q", execution_id="e", attempt=1))


def told(sink: ListSink, job_id: str) -> dict[int, dict[Any, Any]]:
    """Return all that a reader gets of a job: tokens and each channel's text, by choice."""
    choices: dict[int, dict[Any, Any]] = defaultdict(lambda: {"tokens": []})
    for part in sink.parts.get(job_id, []):
        choices[part.choice]["tokens"].extend(part.token_ids)
        for span in part.text:
            key = (span.channel, span.index)
            choices[part.choice][key] = choices[part.choice].get(key, "") + span.text
    return choices


def logprobs(sink: ListSink, job_id: str) -> dict[Any, list[PositionLogprobs]]:
    found: dict[Any, list[PositionLogprobs]] = {}
    for part in sink.parts.get(job_id, []):
        found.setdefault(part.choice, []).extend(part.logprobs or ())
        found.setdefault("prompt", []).extend(part.prompt.logprobs if part.prompt else ())
    return found


def check_told(sink: ListSink, other: ListSink, job: GenerationJob) -> None:
    """See that readers got the same of a job.

    A choice that has no token left fails its job, and the job's other choices are cut where
    they stand, which depends on who else was in the batch. So of a failed job one is all of
    the other as far as it goes, and the choice that failed is the same in both.
    """
    one, two = told(sink, job.job_id), told(other, job.job_id)
    if isinstance(sink.ends[job.job_id], Finished):
        assert one == two
        return
    choices = range(job.sampling.n)
    for choice in choices:
        for key in one[choice].keys() & two[choice].keys():
            num_told = min(len(one[choice][key]), len(two[choice][key]))
            assert one[choice][key][:num_told] == two[choice][key][:num_told]
    assert any(one[choice] == two[choice] for choice in choices)


def check_logprobs(sink: ListSink, other: ListSink, job: GenerationJob) -> None:
    one, two = logprobs(sink, job.job_id), logprobs(other, job.job_id)
    is_whole = isinstance(sink.ends[job.job_id], Finished)
    if is_whole:
        assert one.keys() == two.keys()
    for key in one.keys() & two.keys():
        # Ends of failed jobs differ as `check_told` says.
        for mine, theirs in zip(one[key], two[key], strict=is_whole):
            assert mine.token_id == theirs.token_id
            assert mine.logprob == pytest.approx(theirs.logprob, abs=1e-3)
            best = [each.logprob for each in theirs.top]
            assert [each.logprob for each in mine.top] == pytest.approx(best, abs=1e-3)
    if job.prompt_logprobs is not None and is_whole:
        assert len(one["prompt"]) == len(job.prompt_token_ids) - 1


def check_ends(sink: ListSink, other: ListSink, job_id: str) -> None:
    one, two = sink.ends[job_id], other.ends[job_id]
    if not isinstance(one, Finished):
        # A ban that leaves a grammar nothing.
        assert one == two
        assert one.code == "no_token_allowed"
        return
    assert isinstance(two, Finished)
    for mine, theirs in zip(one.choices, two.choices, strict=True):
        left_out = {"logprobs": None}
        assert mine.model_copy(update=left_out) == theirs.model_copy(update=left_out)
    assert one.usage.completion_tokens == two.usage.completion_tokens
    assert one.usage.reasoning_tokens == two.usage.reasoning_tokens
    for score, again in zip(one.scores, two.scores, strict=True):
        assert score.logprobs == pytest.approx(again.logprobs, abs=1e-3)
    if one.embedding is not None:
        assert two.embedding is not None
        assert one.embedding.floats() == pytest.approx(two.embedding.floats(), abs=1e-3)


def check_coverage(jobs: list[GenerationJob], sink: ListSink) -> None:
    """See that the batch held what it is here for."""
    spans = (s for parts in sink.parts.values() for part in parts for s in part.text)
    assert {span.channel for span in spans} == set(Channel)
    ends = [end for end in sink.ends.values() if isinstance(end, Finished)]
    reasons = {choice.finish_reason for end in ends for choice in end.choices}
    assert reasons == set(FinishReason)
    assert any(choice.matched_stop for end in ends for choice in end.choices)
    assert any(job.prompt_logprobs is not None for job in jobs)
    assert any(job.sampling.n == 2 and job.is_enforced for job in jobs)
    assert {job.kind for job in jobs} == set(JobKind)


def check_batch(lab: Lab, seed: int, make_runner: Callable[[Any], ModelRunner]) -> ListSink:
    jobs = jobs_of(lab, seed)
    together = ListSink()
    loop = a_loop(lab, make_runner(lab.model.model), together)
    for job in jobs:
        admit(loop, job)
        loop.step()
        loop.step()
    while not loop.is_idle:
        loop.step()

    runner = make_runner(lab.model.model)
    for job in jobs:
        alone = ListSink()
        loop = a_loop(lab, runner, alone)
        admit(loop, job)
        while not loop.is_idle:
            loop.step()
        check_told(together, alone, job)
        check_ends(together, alone, job.job_id)
        check_logprobs(together, alone, job)
    return together


@pytest.mark.parametrize("make_runner", RUNNERS)
@pytest.mark.parametrize("seed", [3])
def test_each_job_gets_what_it_gets_alone(make_runner: Any, seed: int) -> None:
    """Sampling, stops, channels, calls, formats, logprobs and readouts don't see each other."""
    lab = marked_lab("special")
    sink = check_batch(lab, seed, make_runner)
    check_coverage(jobs_of(lab, seed), sink)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["special", "text"])
@pytest.mark.parametrize("make_runner", RUNNERS)
def test_each_job_of_many_batches_gets_what_it_gets_alone(make_runner: Any, kind: str) -> None:
    """The same for ten batches each."""
    for seed in range(100, 110):
        check_batch(marked_lab(kind), seed, make_runner)
