"""Spans of the channels on the wire."""

import pytest
from headwater.schemas import Channel, SchemaError, TextSpan


def call(text_start: int, text: str, **fields) -> TextSpan:
    return TextSpan(channel=Channel.TOOL_CALL, text_start=text_start, text=text, **fields)


def test_a_tool_calls_span_survives_the_wire() -> None:
    span = call(0, '{"a"', index=1, name="add", call_id="functions.add:1")

    assert TextSpan.decode(span.encode()) == span


@pytest.mark.parametrize(
    "value",
    [
        {"channel": "tool_call", "text_start": 0, "text": "{}"},
        {"channel": "content", "text_start": 0, "text": "x", "index": 0},
    ],
)
def test_a_span_is_numbered_if_and_only_if_it_is_a_calls(value) -> None:
    with pytest.raises(SchemaError, match="if and only if"):
        TextSpan.parse(value)


def test_the_rest_of_a_span_stands_further_on_and_does_not_name_the_tool_again() -> None:
    span = call(0, '{"a"', index=1, name="add", call_id="x")

    assert span.after(0) == span
    assert span.after(2) == call(2, 'a"', index=1)
