"""Reasoning before an enforced text is told from it, however the text is cut."""

import random

import pytest
from headwater.worker.channel_family import MarkerPair, Mode
from headwater.worker.text.channels import ChannelSplitter
from headwater.worker.text.leading_reasoning import LeadingReasoning
from headwater.worker.text.reply_shape import ReplyShape

from tests.worker.text.families import JSON_CALLS
from tests.worker.text.test_channels import merged

CALL = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'


def split(pieces: list[str], *, is_reasoning: bool = False, calls: bool = False) -> list[tuple]:
    shape = ReplyShape(MarkerPair("<think>", "</think>"), is_reasoning)
    splitter = LeadingReasoning(shape, ChannelSplitter(JSON_CALLS) if calls else None)
    segments = [segment for piece in pieces for segment in splitter.push(piece)]
    return merged([*segments, *splitter.flush(is_complete=True)])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<think>a<b</think>c", [("reasoning", "a<b"), ("content", "c")]),
        ("<think></think>c", [("content", "c")]),
        ("c<think>d</think>", [("content", "c<think>d</think>")]),
        (
            "<think>a</think>b<think>c</think>",
            [("reasoning", "a"), ("content", "b<think>c</think>")],
        ),
        ("<thi", [("content", "<thi")]),
        ("<thinking>", [("content", "<thinking>")]),
        ("<think>a</thi", [("reasoning", "a</thi")]),
        ("", []),
    ],
)
def test_only_what_stands_first_is_reasoning(text: str, expected: list[tuple]) -> None:
    """Markers behind it are text; what was cut short stays where it was."""
    assert split([text]) == expected
    assert split(list(text)) == expected


def test_reasoning_that_the_prompt_began_needs_no_marker() -> None:
    """A marker that begins it again is a part of it."""
    assert split(["a<think></think>{}"], is_reasoning=True) == [
        ("reasoning", "a<think>"),
        ("content", "{}"),
    ]


@pytest.mark.parametrize("is_reasoning", [False, True])
def test_every_cut_of_reasoning_and_calls_gives_the_same(is_reasoning: bool) -> None:
    """Calls behind the reasoning are told apart, those that it mentions are not."""
    text = f"{'' if is_reasoning else '<think>'}so {CALL}</think>\n{CALL}\n{CALL}"
    expected = split([text], is_reasoning=is_reasoning, calls=True)
    assert [run[0] for run in expected] == ["reasoning", "content", 0, "content", 1]
    draw = random.Random(4)
    for _ in range(200):
        cuts = sorted(draw.sample(range(len(text)), draw.randint(0, 12)))
        pieces = [text[i:j] for i, j in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        assert split(pieces, is_reasoning=is_reasoning, calls=True) == expected


def test_the_mode_tells_reasoning_tokens_from_others() -> None:
    """It is what the usage counts by."""
    shape = ReplyShape(MarkerPair("<think>", "</think>"))
    splitter = LeadingReasoning(shape, ChannelSplitter(JSON_CALLS))
    modes = []
    for piece in ("<think>", "a", "</think>", "b", "<tool_call>"):
        splitter.push(piece)
        modes.append(splitter.mode)
    assert modes == [Mode.REASONING, Mode.REASONING, Mode.CONTENT, Mode.CONTENT, Mode.TOOL_CALLS]
