"""What would take a library minutes is counted in a schema before it sees it."""

from typing import Any

import pytest
from headwater.schemas.schema_load import excess


def objects(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties}


def text(number: int) -> dict[str, Any]:
    return {"type": "string", "pattern": f"a{number}"}


def every(num: int, make: Any) -> dict[str, Any]:
    return {"allOf": [make(number) for number in range(num)]}


def chain(num: int, end: dict[str, Any]) -> dict[str, Any]:
    links = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(num)}
    return {"$ref": "#/$defs/d0", "$defs": {**links, f"d{num}": end}}


def multiple(value: float, **more: Any) -> dict[str, Any]:
    return {"type": "number", "multipleOf": value, **more}


def names(num: int, first: int = 0) -> dict[str, Any]:
    return {"patternProperties": {f"^{first + number}x": {} for number in range(num)}}


FINE = {
    "patterns side by side": objects(**{f"p{number}": text(number) for number in range(300)}),
    "a choice of patterns": {"anyOf": [text(number) for number in range(300)]},
    "twelve together": every(12, text),
    "a circle": objects(next={"$ref": "#"}, a={**text(1), "minLength": 3, "format": "uri"}),
    "a long chain": chain(3000, every(12, text)),
    "cents": objects(**{f"p{number}": multiple(0.01) for number in range(500)}),
    "a large one": multiple(100_000),
    "ten decimals": multiple(1e-10),
    "two together": every(2, lambda number: multiple(300 + number)),
    "names": names(70),
    "no schemas": {"enum": [names(500), multiple(10**9)], "properties": 3, "multipleOf": "x"},
    "of another document": objects(a={"$id": "b", "$ref": "#/$defs/none", **text(1)}),
}

TOO_MUCH = {
    "patterns": (every(13, text), "13 patterns, formats and lengths hold for one string"),
    "of one property": (every(13, lambda number: objects(a=text(number))), "13 patterns"),
    "of items": (every(13, lambda number: {"items": text(number)}), "13 patterns"),
    "with a choice": ({**every(12, text), "anyOf": [{}, text(99)]}, "13 patterns"),
    "behind references": (chain(3000, every(13, text)), "13 patterns"),
    "with lengths": (every(5, lambda n: {**text(n), "minLength": n, "format": "uri"}), "15"),
    "a multiple": (multiple(100_001), "multipleOf, in units of its last decimal"),
    "a huge multiple": (multiple(1e300), "multipleOf"),
    "its last decimal": (multiple(123.4567), "multipleOf"),
    "common multiples": (every(2, lambda number: multiple(990 + number)), "multipleOf"),
    "with and without decimals": (
        every(2, lambda number: objects(a=multiple((0.07, 450)[number]), b=multiple(0.0001))),
        "multipleOf",
    ),
    "many multiples": (objects(**{f"p{n}": multiple(9000 + n) for n in range(12)}), "multipleOf"),
    "one with many ranges": (
        {
            **objects(**{f"p{n}": {"$ref": "#/$defs/a", "minimum": n} for n in range(12)}),
            "$defs": {"a": multiple(9001)},
        },
        "multipleOf",
    ),
    "names": (names(71), "pairs of patternProperties come to more than 5000"),
    "names together": (every(3, lambda number: names(40, 40 * number)), "patternProperties"),
    "a long pattern": ({"pattern": "a" * 16_385}, "characters of all patterns"),
    "long names": ({"patternProperties": {"a" * 9000: {}, "b" * 9000: {}}}, "characters of all"),
    "many values": (objects(a={"enum": [1] * 6000}, b={"enum": [1] * 6000}), "values of all enum"),
    "names of many": (objects(**{f"p{n}": names(40) for n in range(7)}), "patternProperties"),
}


@pytest.mark.parametrize("schema", FINE.values(), ids=FINE)
def test_what_compiles_in_time_is_let_through(schema: dict[str, Any]) -> None:
    """What stands side by side does not add up."""
    assert excess([schema]) is None


@pytest.mark.parametrize(("schema", "reason"), TOO_MUCH.values(), ids=TOO_MUCH)
def test_what_would_take_too_long_is_named(schema: dict[str, Any], reason: str) -> None:
    """The reason names the keyword and the limit."""
    assert reason in (excess([schema]) or "")


def test_schemas_count_together() -> None:
    """As those of tools do, of which each alone is fine."""
    assert excess([names(60)]) is None
    assert "patternProperties" in (excess([names(60)] * 3) or "")
    assert "multipleOf" in (excess([multiple(60_000)] * 2) or "")
