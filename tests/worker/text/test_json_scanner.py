"""The scanner agrees with a JSON parser, however the text is cut."""

import json
import random
from collections.abc import Iterable
from typing import Any

import pytest
from headwater.worker.text.json_scanner import JsonScanner, JsonState


def random_value(draw: random.Random, depth: int = 0) -> Any:
    kind = draw.randrange(7 if depth < 4 else 5)
    if kind < 5:
        return draw.choice(["", 'a"\\\n{}[]:,é', -1.5e-7, 12, True, None, "</tool_call>"])
    values = [random_value(draw, depth + 1) for _ in range(draw.randrange(4))]
    return values if kind == 5 else {f'k"{index}': value for index, value in enumerate(values)}


def state(text: str, cuts: Iterable[int] = ()) -> tuple[JsonState, int]:
    ends = sorted(cuts)
    scanner = JsonScanner()
    taken = 0
    for start, end in zip([0, *ends], [*ends, len(text)], strict=True):
        taken += scanner.push(text[start:end])
    return scanner.state, taken


def test_a_whole_value_ends_where_it_ends() -> None:
    """What stands behind it is not looked at."""
    draw = random.Random(1)
    for _ in range(300):
        value = [random_value(draw)] if draw.random() < 0.5 else {"a": random_value(draw)}
        text = json.dumps(value, indent=draw.choice([None, 1]), ensure_ascii=draw.random() < 0.5)
        cuts = [draw.randrange(len(text) + 1) for _ in range(draw.randrange(6))]
        assert state(text + '"}', cuts) == (JsonState.WHOLE, len(text))
        for end in range(0, len(text), 7):
            assert state(text[:end])[0] is JsonState.OPEN


def test_what_is_broken_is_no_json_and_stays_so() -> None:
    """Of a text with one character changed: broken means that no parser takes it."""
    draw = random.Random(2)
    num_broken = 0
    for _ in range(600):
        text = list(json.dumps({"a": random_value(draw), "b": [1, "x"]}))
        text[draw.randrange(len(text))] = draw.choice('"\\{}[]:,x \n<')
        changed = "".join(text)
        found, _ = state(changed)
        assert state(changed, range(1, len(changed)))[0] is found
        if found is JsonState.BROKEN:
            num_broken += 1
            with pytest.raises(json.JSONDecodeError):
                json.loads(changed)
    assert num_broken > 100


@pytest.mark.parametrize("text", ["a", '"a"', "1", "{1", "{,", "[1 2", '{"a" 1', '{"a\n', "[<"])
def test_what_cannot_become_an_object_or_array_is_broken(text: str) -> None:
    """A control character in a string, too: there it has to be escaped."""
    assert state(text)[0] is JsonState.BROKEN
