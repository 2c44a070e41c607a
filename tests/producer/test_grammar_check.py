"""Response formats that can't be enforced are refused before anything is sent."""

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
from headwater.producer.client import Producer, SubmitSettings, new_job
from headwater.producer.errors import InvalidRequest
from headwater.producer.grammar_check import check_grammar
from headwater.schemas import GenerationJob, ResponseFormat, SchemaError, limits
from pydantic import TypeAdapter
from redis import Redis

FORMAT: TypeAdapter[ResponseFormat] = TypeAdapter(ResponseFormat)


def schema(value: dict[str, Any]) -> ResponseFormat:
    return FORMAT.validate_python({"type": "json_schema", "json_schema": value})


def regex(value: str) -> ResponseFormat:
    return FORMAT.validate_python({"type": "regex", "regex": value})


def properties(num: int, value: Any = True) -> dict[str, Any]:
    return {"type": "object", "properties": {f"p{index}": value for index in range(num)}}


def check(response_format: ResponseFormat) -> None:
    check_grammar(new_job("m", [1], max_tokens=4, response_format=response_format))


GOOD = {
    "object": schema(
        {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"$ref": "#/$defs/c"}},
            "$defs": {"c": {"type": "array", "items": {"type": "string"}}},
            "required": ["a"],
        }
    ),
    "recursive": schema(
        {"type": "object", "properties": {"next": {"$ref": "#"}}, "additionalProperties": False}
    ),
    "any object": FORMAT.validate_python({"type": "json_object"}),
    "regex": regex(r"[A-Z]{2}-\d{3}(/x)?"),
    "choice": FORMAT.validate_python({"type": "choice", "choices": ["yes", 'n"o', "é\n"]}),
    "four hundred properties": schema(properties(400)),
}

BAD = {
    "impossible range": (
        schema({"type": "integer", "minimum": 5, "maximum": 3}),
        r"minimum \(5\) is greater than maximum \(3\)",
    ),
    "contradiction": (schema({"allOf": [{"type": "string"}, {"type": "null"}]}), "incompatible"),
    "itself": (schema({"$ref": "#"}), "# requires itself without end"),
    "endless": (
        schema({"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}),
        "# requires itself without end; give it a way out",
    ),
    "not enforced": (schema({"type": "array", "uniqueItems": True}), "uniqueItems"),
    "not enforced, silently": (
        schema({"type": "array", "uniqueItems": True, "x-guidance": {"lenient": True}}),
        "uniqueItems",
    ),
    "overlapping oneOf": (schema({"oneOf": [{"type": "object"}, {"type": "object"}]}), "oneOf"),
    "unknown type": (schema({"type": "strng"}), "strng"),
    "far reference": (schema({"$ref": "https://example.org/x"}), "example.org"),
    "open bracket": (regex("(a"), "unclosed group"),
    "look-ahead": (regex("(?=a)b"), "look-around"),
    "nothing matches": (regex(r"[^\x00-\x{10FFFF}]"), "no text satisfies it"),
}


def nested(depth: int, wrap: Callable[[Any], Any], value: Any) -> Any:
    for _ in range(depth):
        value = wrap(value)
    return value


def definitions(num: int, make: Callable[[dict[str, Any]], dict[str, Any]]) -> dict[str, Any]:
    links = {f"d{index}": make({"$ref": f"#/$defs/d{index + 1}"}) for index in range(num)}
    return {"$ref": "#/$defs/d0", "$defs": {**links, f"d{num}": {"type": "object"}}}


def holding(index: int) -> dict[str, Any]:
    pair = chr(97 + index) + chr(98 + index)
    return {"type": "string", "pattern": f".*{pair}.*"}


TOO_LARGE = {
    "thousands of properties": schema(properties(5000)),
    "exponential combinations": schema(
        {"allOf": [{"anyOf": [properties(2), properties(3)]} for _ in range(40)]}
    ),
    "deep": regex("(" * 2000 + "a" + ")" * 2000),
    "a tower of stars": regex("(" * 300 + "a" + "|a)*" * 300),
    "deep objects": schema(nested(70, lambda value: properties(1, value), {"type": "null"})),
    "a long constant": schema({"const": [1] * 20_000}),
    "patterns of one string": schema({"allOf": [holding(index) for index in range(20)]}),
    "patterns of one property": schema(
        {"allOf": [properties(1, holding(index)) for index in range(20)]}
    ),
    "multiples": schema({"type": "integer", "multipleOf": 5_000_011}),
    "common multiples": schema({"allOf": [{"multipleOf": 9973}, {"multipleOf": 9967}]}),
    "multiples side by side": schema(
        {"properties": {f"p{index}": {"multipleOf": 9001 + index} for index in range(900)}}
    ),
    "patterns of names": schema(
        {"patternProperties": {f"^{index:03}.*x": {} for index in range(300)}}
    ),
    "a long pattern": schema({"type": "string", "pattern": "[^a]*[^b]*" * 5000}),
    "unreachable counts": regex("(a?){5000}a{5000}"),
    "many required": schema({"type": "object", "required": [f"r{index}" for index in range(5000)]}),
}

HOSTILE = {
    "nested repetitions": regex("((.*a.{100}){1,100}b){1,100}" * 20),
    "many states": regex("a{90000}"),
    "counts of counts": regex("(ab{1000000}c){1000000}"),
    "counted letters": regex(r"(\p{L}\p{N}){2000}"),
    "states by the power": regex("|".join(f".*{chr(97 + index)}.{{12}}" for index in range(26))),
    "a long text": schema({"type": "string", "minLength": 50_000, "maxLength": 10**9}),
    "a long array": schema({"type": "array", "items": {"minLength": 10**6}, "minItems": 10**6}),
    "a fan of references": schema(definitions(60, lambda link: properties(8, link))),
    "a fan of conjunctions": schema(definitions(40, lambda link: {"allOf": [link, link, link]})),
    "a long chain": schema(definitions(1000, dict)),
    "many values": schema({"enum": list(range(10_000))}),
    "values with a pattern": schema(
        {
            "enum": [f"v{index:05}" for index in range(1000)],
            "pattern": "^.*1.*2.*$",
            "type": "string",
        }
    ),
    "choices": FORMAT.validate_python(
        {"type": "choice", "choices": ["a" * 20 + str(index) for index in range(1024)]}
    ),
    "many formats": schema(properties(300, {"type": "string", "format": "email"})),
}


@pytest.mark.parametrize("good", GOOD.values(), ids=GOOD)
def test_what_can_be_enforced_is_accepted(good: ResponseFormat) -> None:
    check(good)


@pytest.mark.parametrize(("bad", "reason"), BAD.values(), ids=BAD)
def test_what_cannot_be_enforced_is_refused_with_the_reason(
    bad: ResponseFormat, reason: str
) -> None:
    for _ in range(2):  # the second answer is a remembered one
        with pytest.raises(InvalidRequest, match=reason) as caught:
            check(bad)
        assert str(caught.value).startswith(f"response_format ({bad.type}) can't be enforced: ")
        assert "\n" not in str(caught.value)


@pytest.mark.timeout(10)
@pytest.mark.parametrize("hostile", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_format_is_judged_in_bounded_time(hostile: ResponseFormat) -> None:
    """The time limit is the test: without limits of our own some of them take minutes."""
    with suppress(InvalidRequest):
        check(hostile)


@pytest.mark.timeout(10)
@pytest.mark.parametrize("large", TOO_LARGE.values(), ids=TOO_LARGE)
def test_what_is_too_large_to_enforce_is_refused_in_time(large: ResponseFormat) -> None:
    """In one line, and long before a library would have found out."""
    with pytest.raises(InvalidRequest, match="can't be enforced") as caught:
        check(large)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"type": "xml"}, "'json_schema', 'json_object', 'regex', 'choice'"),
        ({"type": "json_schema", "json_schema": True}, "json_schema.json_schema: .*dictionary"),
        (
            {"type": "json_schema", "json_schema": {"description": "x" * 70_000}},
            f"at most {limits.MAX_JSON_SCHEMA_BYTES}",
        ),
        ({"type": "regex", "regex": ""}, "at least 1 character"),
        ({"type": "regex", "regex": "a" * 8193}, "at most 8192"),
        ({"type": "choice", "choices": []}, "at least 1"),
        ({"type": "choice", "choices": [""]}, "choices.0"),
        ({"type": "choice", "choices": ["x" * 40_000]}, "40000 characters together"),
        ({"type": "choice", "choices": ["x"] * 1025}, "1024"),
    ],
)
def test_a_malformed_format_names_the_field(value: dict[str, Any], message: str) -> None:
    with pytest.raises(SchemaError, match=message):
        new_job("m", [1], max_tokens=4, response_format=value)


@pytest.mark.parametrize("fields", [{"min_tokens": 2}, {"ignore_eos": True}])
def test_what_would_write_past_the_format_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(SchemaError, match="give neither min_tokens"):
        new_job("m", [1], max_tokens=4, response_format={"type": "json_object"}, **fields)


def test_a_refused_format_never_reaches_the_server(redis: Redis) -> None:
    producer = Producer(redis, SubmitSettings(check_model=False))
    with pytest.raises(InvalidRequest, match="response_format"):
        producer.submit(new_job("m", [1], max_tokens=4, response_format=BAD["itself"][0]))
    assert redis.keys("rq:job:*") == []


def forced(*parameters: Any) -> GenerationJob:
    tools = [
        {"type": "function", "function": {"name": f"find{number}", "parameters": each}}
        for number, each in enumerate(parameters)
    ]
    return new_job("m", [1], max_tokens=4, tools=tools, tool_choice="required")


@pytest.mark.parametrize(
    "parameters",
    [
        None,
        {},
        properties(3),
        {"$defs": {"c": {"enum": [1]}}, **properties(1, {"$ref": "#/$defs/c"})},
    ],
)
def test_calls_of_ordinary_tools_can_be_forced(parameters: Any) -> None:
    """Each tool's schema stands for itself, its references too."""
    check_grammar(forced(parameters))


@pytest.mark.parametrize(
    ("parameters", "reason"),
    [
        ("x", "must be the schema of an object"),
        ({"type": "string"}, "must be the schema of an object"),
        ({"properties": {"a": {"$ref": "#"}}, "required": ["a"]}, "requires itself without end"),
        (properties(1, {"type": "array", "uniqueItems": True}), "uniqueItems"),
        (properties(5000), "too"),
    ],
)
def test_tools_whose_calls_cannot_be_enforced_are_refused(parameters: Any, reason: str) -> None:
    """Only a forced call needs its schema enforced; the same tool may be offered."""
    with pytest.raises(InvalidRequest, match=reason) as caught:
        check_grammar(forced(parameters))
    assert str(caught.value).startswith("tool_choice can't be enforced: ")
    check_grammar(forced(parameters).model_copy(update={"tool_choice": "auto"}))


def test_tools_count_together() -> None:
    """Each of them is fine alone."""
    tools = [properties(1, {"multipleOf": 30_001 + index}) for index in range(4)]
    for each in tools:
        check_grammar(forced(each))
    with pytest.raises(InvalidRequest, match="multipleOf"):
        check_grammar(forced(*tools))
