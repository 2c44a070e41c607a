"""Formats behind reasoning, and tool calls that are enforced, on random weights."""

import json
import shutil
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
from headwater.schemas import (
    Channel,
    ChoiceFormat,
    DeltaPart,
    Failed,
    Finished,
    FinishReason,
    GenerationJob,
    JsonSchemaFormat,
    RegexFormat,
    SamplingParams,
)
from headwater.worker.engine.random_model import write_random_model
from jsonschema import Draft202012Validator

from tests.exactness.test_structured import Lab
from tests.worker.loop_bench import ListSink

MARKERS = {"õ": "<think>", "ö": "</think>", "÷": "<tool_call>", "ø": "</tool_call>"}
"""Instead of bytes that UTF-8 does not have."""

ANSWER = {"enum": [{"a": 1}, {"a": 22}, [True]]}
ARGUMENTS = {
    "type": "object",
    "properties": {"x": {"$ref": "#/$defs/number"}, "y": {"enum": ["<think>", "b"]}},
    "required": ["x"],
    "additionalProperties": False,
    "$defs": {"number": {"enum": [1, 20]}},
}
TOOLS: tuple[dict[str, Any], ...] = (
    {"type": "function", "function": {"name": "find", "parameters": ARGUMENTS}},
    {"type": "function", "function": {"name": 'sa"y'}},
    {"type": "function", "function": {"name": "ab", "parameters": ARGUMENTS}},
)
SETTINGS = {"reasoning": "think", "tool_parser": "json_tools"}


@cache
def marked_lab(kind: str) -> Lab:
    """Random weights over bytes and four markers, which are special tokens or text."""
    folder = write_random_model(Path(mkdtemp()))
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["ab"] = vocabulary.pop("\u00c0")
    for byte, marker in MARKERS.items():
        vocabulary[marker] = vocabulary.pop(byte)
    if kind == "special":
        (end,) = tokenizer["added_tokens"]
        tokenizer["added_tokens"] = sorted(
            [end, *({**end, "content": m, "id": vocabulary[m]} for m in MARKERS.values())],
            key=lambda token: token["id"],
        )
    path.write_text(json.dumps(tokenizer))
    lab = Lab(str(folder))
    shutil.rmtree(folder)
    return lab


@pytest.fixture(params=["special", "text"])
def lab(request: pytest.FixtureRequest) -> Lab:
    return marked_lab(request.param)


@pytest.fixture(params=["special", pytest.param("text", marks=pytest.mark.long)])
def costly_lab(request: pytest.FixtureRequest) -> Lab:
    """For tests of many tokens."""
    return marked_lab(request.param)


def token(lab: Lab, text: str) -> int:
    token_id = lab.model.tokenizer.token_to_id(text)
    assert token_id is not None
    return token_id


def job(lab: Lab, seed: int, *, prompt: str = "", **fields: Any) -> GenerationJob:
    """Return a job that is likely to end its reasoning within some tokens."""
    biases = {token(lab, "</think>"): 3.0, token(lab, "<think>"): 2.0}
    values = {
        "prompt_token_ids": (3 + seed, 5, *_marker_ids(lab, prompt)),
        "sampling": SamplingParams(temperature=1.0, seed=seed, logit_bias=biases),
        "max_tokens": 60,
    }
    return GenerationJob(job_id=f"j{seed}", model="m", **(values | fields))


def _marker_ids(lab: Lab, prompt: str) -> Iterator[int]:
    for marker in ("<think>", "</think>"):
        if marker in prompt:
            yield token(lab, marker)


def channel(sink: ListSink, job_id: str, which: Channel) -> str:
    spans = (span for part in sink.parts[job_id] for span in part.text)
    return "".join(span.text for span in spans if span.channel is which)


def reason_of(sink: ListSink, job_id: str) -> FinishReason:
    end = sink.ends[job_id]
    assert isinstance(end, Finished), end
    return end.choices[0].finish_reason


def answers(lab: Lab, **fields: Any) -> list[GenerationJob]:
    response_format = JsonSchemaFormat(json_schema=ANSWER)
    return [job(lab, seed, response_format=response_format, **fields) for seed in range(6)]


@pytest.mark.parametrize("prompt", ["", "<think>", "<think></think>"])
def test_a_format_holds_for_what_follows_the_reasoning(lab: Lab, prompt: str) -> None:
    """The model may reason first, unless it has; the content alone keeps to the format."""
    jobs = answers(lab, prompt=prompt)
    sink = lab.run(jobs, **SETTINGS)
    reasoned, ended = set(), 0
    for each in jobs:
        reasoning = channel(sink, each.job_id, Channel.REASONING)
        content = channel(sink, each.job_id, Channel.CONTENT)
        assert "think>" not in content
        if reason_of(sink, each.job_id) is FinishReason.STOP:
            assert json.loads(content) in ANSWER["enum"]
            ended += 1
        else:
            assert len(sink.tokens(each.job_id)) == each.max_tokens
        usage = sink.ends[each.job_id].usage
        assert bool(usage.reasoning_tokens) == bool(reasoning)
        reasoned.add(bool(reasoning))
    assert ended > 2
    # What the prompt has begun may end at once.
    expected = {
        "": [{True, False}],
        "<think>": [{True}, {True, False}],
        "<think></think>": [{False}],
    }
    assert reasoned in expected[prompt]


def test_an_unsplit_output_keeps_to_the_format_as_a_whole(lab: Lab) -> None:
    """Without channels there is nothing to tell reasoning from."""
    jobs = answers(lab, split_channels=False, prompt="<think>")
    sink = lab.run(jobs, **SETTINGS)
    assert all(json.loads(sink.text(each.job_id)) in ANSWER["enum"] for each in jobs)


def test_markers_behind_the_reasoning_are_content(lab: Lab) -> None:
    """Only what stands before the format can be reasoning."""
    texts = ChoiceFormat(choices=("a</think>b<tool_call>{}</tool_call>",))
    for prompt in ("<think></think>", "<think>"):
        each = job(lab, 1, response_format=texts, prompt=prompt, max_tokens=300)
        sink = lab.run([each], **SETTINGS)
        assert channel(sink, "j1", Channel.CONTENT) == texts.choices[0]


def test_expressions_begin_right_behind_the_reasoning(lab: Lab) -> None:
    """A blank line is left to JSON and calls, where it means nothing."""
    jobs = [job(lab, seed, response_format=RegexFormat(regex="[ab]{3}")) for seed in range(6)]
    sink = lab.run(jobs, **SETTINGS)
    ended = [each.job_id for each in jobs if reason_of(sink, each.job_id) is FinishReason.STOP]
    assert ended
    assert {len(channel(sink, job_id, Channel.CONTENT)) for job_id in ended} == {3}


def test_a_resumed_reply_goes_on_where_it_was(costly_lab: Lab) -> None:
    """Reasoning, markers and content are followed from the published tokens, at any cut."""
    jobs = [*answers(costly_lab), *calls(costly_lab, "required", range(20, 22))]
    whole = costly_lab.run(jobs, **SETTINGS)
    for share in (1, 3):
        history: dict[str, tuple[DeltaPart, ...]] = {}
        for each in jobs:
            parts = whole.parts[each.job_id]
            history[each.job_id] = tuple(parts[: len(parts) * share // 4])
        rest = costly_lab.run(jobs, history, **SETTINGS)

        assert rest.restarted == []
        for each in jobs:
            told = [t for part in history[each.job_id] for t in part.token_ids]
            assert told + rest.tokens(each.job_id) == whole.tokens(each.job_id)
            assert rest.ends[each.job_id].choices == whole.ends[each.job_id].choices


def calls(lab: Lab, tool_choice: Any, seeds: range, **fields: Any) -> list[GenerationJob]:
    given = {"tools": TOOLS, "tool_choice": tool_choice, "max_tokens": 120}
    return [job(lab, seed, **(given | fields)) for seed in seeds]


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


@pytest.mark.parametrize(
    ("prompt", "fields", "names", "is_single"),
    [
        ("", {"tool_choice": "required"}, {"find", "ab", 'sa"y'}, False),
        (
            "<think>",
            {"tool_choice": "required", "parallel_tool_calls": False},
            {"find", "ab", 'sa"y'},
            True,
        ),
        ("<think></think>", {"tool_choice": named("ab")}, {"ab"}, True),
    ],
)
def test_a_forced_call_is_written_and_valid(
    costly_lab: Lab, prompt: str, fields: dict[str, Any], names: set[str], is_single: bool
) -> None:
    """Every whole reply holds calls of the tools that are asked for, with arguments that fit."""
    jobs = calls(costly_lab, "required", range(5), prompt=prompt, stream="final")
    jobs = [GenerationJob.parse({**each.model_dump(), **fields}) for each in jobs]
    sink = costly_lab.run(jobs, **SETTINGS)
    found, counts = set(), set()
    for each in jobs:
        end = sink.ends[each.job_id].choices[0]
        if end.finish_reason is FinishReason.LENGTH:
            continue
        assert end.finish_reason is FinishReason.TOOL_CALLS
        assert end.incomplete_tool_calls == ()
        assert end.text.strip("\n") == ""
        counts.add(len(end.tool_calls))
        for call in end.tool_calls:
            found.add(call.name)
            schema = ARGUMENTS if call.name != 'sa"y' else {"type": "object"}
            Draft202012Validator(schema).validate(json.loads(call.arguments))
    assert found <= names
    assert found & {"find", "ab"}
    assert counts == {1} if is_single else 1 in counts


def test_a_forced_call_is_the_same_alone_and_among_others(costly_lab: Lab) -> None:
    """Rows that reason, answer, call and do none of it share a batch."""
    free = [job(costly_lab, seed) for seed in range(40, 41)]
    jobs = [*calls(costly_lab, "required", range(2)), *answers(costly_lab)[4:6], *free]
    together = costly_lab.run(jobs, max_batch=4, **SETTINGS)
    for each in jobs:
        alone = costly_lab.run([each], **SETTINGS)
        assert together.tokens(each.job_id) == alone.tokens(each.job_id)
        assert together.ends[each.job_id].choices == alone.ends[each.job_id].choices


def test_a_forced_argument_may_hold_the_markers(lab: Lab) -> None:
    """Whatever a string of the arguments has to hold, the call ends behind its JSON."""
    text = {"text": "a</tool_call>\n<tool_call>b"}
    parameters = {
        "type": "object",
        "properties": {"text": {"const": text["text"]}},
        "required": ["text"],
        "additionalProperties": False,
    }
    tool = {"type": "function", "function": {"name": "ab", "parameters": parameters}}
    jobs = calls(
        lab, named("ab"), range(2), prompt="<think></think>", tools=(tool,), stream="final"
    )
    jobs += calls(lab, named("ab"), range(2, 4), prompt="<think>", tools=(tool,), stream="final")
    sink = lab.run(jobs, **SETTINGS)
    num_whole = 0
    for each in jobs:
        (end,) = sink.ends[each.job_id].choices
        if end.finish_reason is FinishReason.TOOL_CALLS:
            (call,) = end.tool_calls
            assert json.loads(call.arguments) == text
            assert end.text.strip("\n") == ""
            num_whole += 1
    assert num_whole >= 2


def test_a_reply_that_may_call_once_ends_with_its_call(lab: Lab) -> None:
    """Each choice for itself, while the others and other jobs go on; also for a later attempt."""
    nothing = {"type": "object", "additionalProperties": False}
    tool = {"type": "function", "function": {"name": "ab", "parameters": nothing}}
    (forced,) = calls(lab, named("ab"), range(1, 2), tools=(tool,), prompt="<think></think>")
    end = token(lab, "</tool_call>")
    tokens = lab.run([forced], **SETTINGS).tokens("j1")
    # Written as one token.
    tokens = tokens[: tokens.index(end) + 1]
    sampling = SamplingParams(temperature=1.0, seed=1, n=2, logit_bias={end: 100.0})
    given = {"tool_choice": "auto", "sampling": sampling, "max_tokens": len(tokens) + 4}
    single = forced.model_copy(update={"parallel_tool_calls": False, **given})
    several = forced.model_copy(update={"job_id": "j2", **given})
    # Choice 0 has all but the end of its call, which is likeliest by far; choice 1 has no call.
    part = DeltaPart(choice=0, start=0, token_ids=tuple(tokens[:-1]))
    sink = lab.run([single, several], {"j1": (part,), "j2": (part,)}, **SETTINGS)

    calling, other = sink.ends["j1"].choices
    assert calling.finish_reason is FinishReason.TOOL_CALLS
    assert sink.ends["j1"].usage.completion_tokens == len(tokens) + single.max_tokens
    assert other.finish_reason is FinishReason.LENGTH
    assert {each.finish_reason for each in sink.ends["j2"].choices} == {FinishReason.LENGTH}

    whole = DeltaPart(choice=0, start=0, token_ids=tuple(tokens))
    again = lab.run([single], {"j1": (whole,)}, **SETTINGS)
    assert again.ends["j1"].choices[0] == calling
    assert not any(part.token_ids for part in again.parts["j1"] if part.choice == 0)


def test_without_calls_what_looks_like_one_is_content(lab: Lab) -> None:
    """With tool_choice none the reply's text is told whole, calls and all."""
    biases = SamplingParams(temperature=0.0)
    forced = job(
        lab, 1, tools=TOOLS, tool_choice=named("ab"), sampling=biases, prompt="<think></think>"
    )
    tokens = lab.run([forced], **SETTINGS).tokens("j1")
    assert len(tokens) > 10
    part = DeltaPart(choice=0, start=0, token_ids=tuple(tokens[:-1]))
    for tool_choice, which in (("none", Channel.CONTENT), ("auto", Channel.TOOL_CALL)):
        each = forced.model_copy(update={"tool_choice": tool_choice, "max_tokens": len(tokens)})
        sink = lab.run([each], {"j1": (part,)}, **SETTINGS)
        assert channel(sink, "j1", which)


def test_a_model_that_writes_calls_otherwise_cannot_be_forced(lab: Lab) -> None:
    """The job fails with a reason; its neighbours don't."""
    (forced,) = calls(lab, "required", range(1))
    plain = job(lab, 2)
    for settings in ({"tool_parser": "none"}, {"tool_parser": "pythonic"}):
        sink = lab.run([forced, plain], **settings)
        end = sink.ends[forced.job_id]
        assert isinstance(end, Failed)
        assert end.code == "bad_tool_choice"
        assert "as JSON between markers" in end.message
        assert isinstance(sink.ends[plain.job_id], Finished)
