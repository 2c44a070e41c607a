"""Which calls a job may force, and what must go with it."""

from typing import Any

import pytest
from headwater.schemas import GenerationJob, NamedTool, SchemaError

TOOLS = [
    {"type": "function", "function": {"name": "find", "parameters": {"type": "object"}}},
    {"name": "plain"},
]


def parse(**fields: Any) -> GenerationJob:
    values = {"job_id": "j", "model": "m", "prompt_token_ids": (1,), "max_tokens": 9}
    return GenerationJob.parse({**values, "tools": TOOLS, **fields})


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def test_a_forced_call_survives_the_wire() -> None:
    """The choice is told as in chat requests."""
    job = parse(tool_choice=named("find"))

    assert GenerationJob.decode(job.encode()) == job
    assert isinstance(job.tool_choice, NamedTool)
    assert [tool["function"]["name"] for tool in job.forced_tools] == ["find"]
    assert (job.is_enforced, job.may_call_in_parallel) == (True, False)


@pytest.mark.parametrize(
    ("fields", "num_forced", "in_parallel"),
    [
        ({}, 0, False),
        ({"tool_choice": "none"}, 0, False),
        ({"tool_choice": "required"}, 2, True),
        ({"tool_choice": "required", "parallel_tool_calls": False}, 2, False),
        ({"tool_choice": named("plain")}, 1, False),
        ({"tools": [], "parallel_tool_calls": False}, 0, False),
    ],
)
def test_what_a_choice_forces(fields: dict[str, Any], num_forced: int, in_parallel: bool) -> None:
    """`required` takes any tool, any number of times; a named one is called once."""
    job = parse(**fields)
    assert (len(job.forced_tools), job.may_call_in_parallel) == (num_forced, in_parallel)


@pytest.mark.parametrize(
    ("fields", "ends"),
    [
        ({"parallel_tool_calls": False}, True),
        ({"parallel_tool_calls": False, "tools": []}, True),
        ({"parallel_tool_calls": True}, False),
        ({"parallel_tool_calls": False, "tool_choice": "none"}, False),
        ({"parallel_tool_calls": False, "tool_choice": "required"}, False),
    ],
)
def test_whether_the_first_call_ends_a_reply(fields: dict[str, Any], ends: bool) -> None:
    """Only a reply that may call needs it: a grammar ends those that have to."""
    assert parse(**fields).ends_after_call is ends


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"tool_choice": "sometimes"}, "tool_choice"),
        ({"tool_choice": named("")}, "tool_choice"),
        ({"tool_choice": {"type": "custom"}}, "tool_choice"),
        ({"tool_choice": named("other")}, r"none such; it has \['find', 'plain'\]"),
        ({"tool_choice": "required", "tools": []}, "none such"),
        ({"tool_choice": "required", "tools": [{"type": "function"}]}, "needs a function.name"),
        ({"tool_choice": "required", "response_format": {"type": "json_object"}}, "without"),
        ({"tool_choice": "required", "split_channels": False}, "goes with split_channels"),
        ({"tool_choice": "required", "min_tokens": 2}, "tool_choice decides where"),
        ({"tool_choice": "required", "ignore_eos": True}, "tool_choice decides where"),
        ({"parallel_tool_calls": False, "split_channels": False}, "needs split_channels"),
        ({"parallel_tool_calls": False, "min_tokens": 2}, r"give no min_tokens \(2\)"),
        ({"kind": "embedding", "max_tokens": 1, "tool_choice": "required"}, "means nothing"),
    ],
)
def test_what_does_not_go_together_is_refused(fields: dict[str, Any], problem: str) -> None:
    """Each refusal says what is in the way."""
    with pytest.raises(SchemaError, match=problem):
        parse(**fields)
