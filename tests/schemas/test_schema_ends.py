"""Schemas that no finite value can satisfy are found, those with any way out are not."""

import random
from typing import Any

import pytest
from headwater.schemas.schema_ends import endless_reference

from tests.exactness.random_schemas import random_schema

SELF = {"$ref": "#"}
LINK = {"type": "object", "properties": {"next": SELF}}


def with_definitions(**definitions: Any) -> dict[str, Any]:
    return {"$ref": "#/$defs/a", "$defs": definitions}


def ref(name: str) -> dict[str, str]:
    return {"$ref": f"#/$defs/{name}"}


def holder(name: str) -> dict[str, Any]:
    return {"type": "object", "properties": {"x": ref(name)}, "required": ["x"]}


ENDLESS = {
    "direct": ({**LINK, "required": ["next"]}, "#"),
    "nothing else": (SELF, "#"),
    "mutual": (with_definitions(a=holder("b"), b=holder("a")), "#/$defs/a"),
    "of a definition": (
        {"anyOf": [{"type": "null"}, ref("a")], "$defs": {"a": holder("a")}},
        "#/$defs/a",
    ),
    "an array that holds one": ({"type": "array", "items": SELF, "minItems": 1}, "#"),
    "an array's first": ({"type": "array", "prefixItems": [SELF], "minItems": 1}, "#"),
    "draft 4's first": ({"type": "array", "items": [SELF], "minItems": 1}, "#"),
    "every choice": ({"anyOf": [{**LINK, "required": ["next"]}, {"oneOf": [SELF]}]}, "#"),
    "in parts": ({"allOf": [{"type": "object", "required": ["next"]}, LINK]}, "#"),
    "by any name": ({"type": "object", "required": ["x"], "additionalProperties": SELF}, "#"),
    "one at least": ({**LINK, "minProperties": 1, "additionalProperties": False}, "#"),
    "a circle of references": (with_definitions(a=ref("b"), b=ref("a")), "#/$defs/a"),
    "a name like that of itself": (
        {"$ref": "#/$defs/a~1b%20c", "$defs": {"a/b c": {"$ref": "#/$defs/a~1b%20c"}}},
        "#/$defs/a~1b%20c",
    ),
}

WITH_AN_END = {
    "optional": LINK,
    "or null": ({"type": "object", "properties": {"next": {"anyOf": [SELF, {"type": "null"}]}}}),
    "required, or null": {
        "type": "object",
        "properties": {"next": {"anyOf": [SELF, {"type": "null"}]}},
        "required": ["next"],
    },
    "two types": {**LINK, "type": ["object", "null"], "required": ["next"]},
    "no type at all": {"properties": {"next": SELF}, "required": ["next"]},
    "an array": {"type": "array", "items": SELF},
    "a required array": {
        "type": "object",
        "properties": {"children": {"type": "array", "items": SELF}},
        "required": ["children"],
    },
    "an array whose first ends": {
        "type": "array",
        "prefixItems": [{"type": "null"}],
        "items": SELF,
        "minItems": 1,
    },
    "mutual": with_definitions(a=holder("b"), b={"anyOf": [holder("a"), {"type": "null"}]}),
    "another name": {**LINK, "required": ["other"]},
    "one of any": {**LINK, "minProperties": 1},
    "a written value": {"enum": [None, 1], **LINK, "required": ["next"]},
    "impossible for another reason": {"type": "object", "properties": {"a": False}},
    "no reference of ours": {"$ref": "https://example.org/x"},
    "no such definition": {"$ref": "#/$defs/none"},
}


@pytest.mark.parametrize(("schema", "reference"), ENDLESS.values(), ids=ENDLESS)
def test_what_requires_itself_is_named(schema: dict[str, Any], reference: str) -> None:
    """The first reference whose value would never end is told."""
    assert endless_reference(schema) == reference


@pytest.mark.parametrize("schema", WITH_AN_END.values(), ids=WITH_AN_END)
def test_any_way_out_is_enough(schema: dict[str, Any]) -> None:
    """Optional properties, other types, other choices and empty arrays end a recursion."""
    assert endless_reference(schema) is None


def test_random_schemas_without_recursion_all_end() -> None:
    """A schema that refers to nothing but a leaf is never refused."""
    schemas = [random_schema(random.Random(seed)) for seed in range(300)]
    assert {endless_reference(schema) for schema in schemas} == {None}


@pytest.mark.timeout(10)
@pytest.mark.parametrize("seed", range(3))
def test_a_hostile_schema_is_judged_in_bounded_time(seed: int) -> None:
    """A thousand definitions that lead to each other in no order are given up, not worked out."""
    order = random.Random(seed).sample(range(900), 900)
    names = {f"p{index}": ref(f"d{index}") for index in order}
    chain = {f"d{index}": holder(f"d{index + 1}") for index in range(899)}
    schema = {"type": "object", "properties": names, "$defs": {**chain, "d899": {}}}
    assert endless_reference(schema) is None
    deep = {f"d{index}": {"allOf": [ref(f"d{index + 1}")]} for index in range(900)}
    assert endless_reference({**ref("d0"), "$defs": deep}) is None
