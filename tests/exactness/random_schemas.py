"""Seeded random JSON schemas of what a grammar can enforce, small enough to be completed."""

import random
from typing import Any

NAMES = ["id", "name", "größe", "x", "tags", "is ok", 'quo"te']
WORDS = ["red", "green", "sky blue", "ß", "🙂", 'a"b', "c\\d", ""]


def random_schema(rng: random.Random) -> dict[str, Any]:
    """Return a schema with one definition that it may refer to."""
    schema = _any(rng, depth=3)
    return {**schema, "$defs": {"leaf": _leaf(rng)}}


def _any(rng: random.Random, depth: int) -> dict[str, Any]:
    if depth == 0:
        return rng.choice([_leaf(rng), {"$ref": "#/$defs/leaf"}])
    kinds = [_object, _object, _array, _either, lambda rng, depth: _leaf(rng)]
    return rng.choice(kinds)(rng, depth - 1)


def _object(rng: random.Random, depth: int) -> dict[str, Any]:
    names = rng.sample(NAMES, rng.randint(1, 3))
    schema = {
        "type": "object",
        "properties": {name: _any(rng, depth) for name in names},
        "required": [name for name in names if rng.random() < 0.7],
    }
    if rng.random() < 0.7:
        schema["additionalProperties"] = rng.choice([False, _leaf(rng)])
    return schema


def _array(rng: random.Random, depth: int) -> dict[str, Any]:
    least = rng.randint(0, 2)
    schema: dict[str, Any] = {"type": "array", "items": _any(rng, depth), "minItems": least}
    if rng.random() < 0.8:
        schema["maxItems"] = least + rng.randint(0, 2)
    if rng.random() < 0.3:
        schema["prefixItems"] = [_leaf(rng)]
    return schema


def _either(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"anyOf": [_any(rng, depth) for _ in range(rng.randint(2, 3))]}


def _leaf(rng: random.Random) -> dict[str, Any]:
    low = rng.randint(-50, 50)
    string: dict[str, Any] = {"type": "string", "maxLength": rng.randint(0, 8)}
    return rng.choice(
        [
            {"type": "integer", "minimum": low, "maximum": low + rng.randint(0, 1000)},
            {"type": "integer"},
            {"type": "number", "exclusiveMinimum": low},
            {"type": "integer", "multipleOf": rng.randint(2, 9)},
            {"type": "boolean"},
            {"type": "null"},
            {"type": ["string", "null"], "maxLength": 5},
            string,
            {"type": "string", "pattern": rng.choice(["^[a-c]{2,4}$", "^\\d{1,3}(-\\d)?$"])},
            {"type": "string", "format": rng.choice(["date", "ipv4", "uuid"])},
            {"enum": rng.sample(WORDS, 3)},
            {"const": rng.choice([*WORDS, 7, None, [1, "a"], {"k": [True]}])},
        ]
    )
