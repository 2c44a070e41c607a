"""Reasoning and tool calls are told from content, however the text is cut."""

import random
from collections.abc import Sequence

import pytest
from headwater.worker.channel_family import Mode
from headwater.worker.text.channels import ChannelSplitter
from headwater.worker.text.segment import Segment
from headwater.worker.text.stops import StopMatcher

from tests.worker.text.families import ENDLESS_CALLS, JSON_CALLS, WORD_CALLS

ADD = '{"name": "add", "arguments": {"a": 1, "b": "}\\""}}'
ADD_ARGUMENTS = '{"a": 1, "b": "}\\""}'


def merged(segments: Sequence[Segment]) -> list[tuple]:
    """Return the channels' runs in order: (kind, text), for calls (number, name, arguments)."""
    runs: list[list] = []
    for segment in segments:
        if not segment.text:
            continue
        kind = segment.call or ("reasoning" if segment.is_reasoning else "content")
        if runs and runs[-1][0] == kind:
            runs[-1][1] += segment.text
        else:
            runs.append([kind, segment.text])
    return [
        (kind, text) if isinstance(kind, str) else (kind.number, kind.name, text)
        for kind, text in runs
    ]


def split(family, pieces: Sequence[str], *, is_complete: bool = True, **settings) -> list[tuple]:
    splitter = ChannelSplitter(family, **settings)
    segments = [segment for piece in pieces for segment in splitter.push(piece)]
    return merged([*segments, *splitter.flush(is_complete=is_complete)])


def test_reasoning_is_told_from_content_and_only_the_markers_are_removed() -> None:
    assert split(JSON_CALLS, ["<think>\nhm\n</think>\n\nYes."]) == [
        ("reasoning", "\nhm\n"),
        ("content", "\n\nYes."),
    ]


def test_no_part_of_a_marker_gets_out_and_nothing_else_is_held() -> None:
    splitter = ChannelSplitter(JSON_CALLS)

    assert merged(splitter.push("a <th")) == [("content", "a ")]
    assert merged(splitter.push("is> <thin")) == [("content", "<this> ")]
    assert merged(splitter.push("k>b</thi")) == [("reasoning", "b")]
    assert merged(splitter.push("nk>c")) == [("content", "c")]


def test_reasoning_that_the_template_opened_needs_no_marker() -> None:
    assert split(JSON_CALLS, ["hm</think>Yes."], start=Mode.REASONING) == [
        ("reasoning", "hm"),
        ("content", "Yes."),
    ]


def test_reasoning_that_is_cut_short_stays_reasoning() -> None:
    assert split(JSON_CALLS, ["<think>hm</thi"], is_complete=False) == [("reasoning", "hm</thi")]


def test_an_end_marker_without_its_beginning_is_content() -> None:
    assert split(JSON_CALLS, ["a</think>b"]) == [("content", "a</think>b")]


def test_a_json_call_is_named_at_once_and_its_arguments_come_as_they_grow() -> None:
    splitter = ChannelSplitter(JSON_CALLS)

    assert splitter.push('<tool_call>{"name": "add", "argu') == []
    assert merged(splitter.push('ments": {"a"')) == [(0, "add", '{"a"')]
    assert merged(splitter.push(": 1}")) == [(0, "add", ": 1}")]
    assert splitter.push("}</tool_call>") == []
    assert (splitter.num_whole_calls, splitter.incomplete_calls) == (1, ())


def test_calls_are_numbered_in_their_order_and_the_text_between_them_is_content() -> None:
    text = f"Let me see.<tool_call>{ADD}</tool_call>\n<tool_call>\n{ADD}\n</tool_call>"

    assert split(JSON_CALLS, [text]) == [
        ("content", "Let me see."),
        (0, "add", ADD_ARGUMENTS),
        ("content", "\n"),
        (1, "add", ADD_ARGUMENTS),
    ]


def test_a_call_can_interrupt_the_reasoning() -> None:
    assert split(JSON_CALLS, [f"<think>hm<tool_call>{ADD}</tool_call>"]) == [
        ("reasoning", "hm"),
        (0, "add", ADD_ARGUMENTS),
    ]


def test_a_call_that_does_not_begin_with_its_name_comes_when_it_is_complete() -> None:
    splitter = ChannelSplitter(JSON_CALLS)

    assert splitter.push('<tool_call>{"arguments": {"a": 1}, "name": "add"}') == []
    assert merged(splitter.push("</tool_call>")) == [(0, "add", '{"a": 1}')]


def test_a_call_without_arguments_has_an_empty_object() -> None:
    assert split(JSON_CALLS, ['<tool_call>{"name": "now"}</tool_call>']) == [(0, "now", "{}")]


def test_a_call_that_names_no_tool_for_long_is_not_searched_again_and_again() -> None:
    padding = " " * 5000
    text = f'<tool_call>{padding}{{"name": "add", "arguments": {{"a": 1}}}}</tool_call>'

    assert split(JSON_CALLS, list(text)) == [(0, "add", '{"a": 1}')]


@pytest.mark.parametrize("body", ["", "add(1, 2)", '{"name": 3, "arguments": {}}', '{"name": "a'])
def test_a_call_that_cannot_be_parsed_is_content_as_it_stands(body: str) -> None:
    text = f"a<tool_call>{body}</tool_call>b"

    assert split(JSON_CALLS, [text]) == [("content", text)]


def test_a_call_cut_short_before_its_name_is_content() -> None:
    assert split(JSON_CALLS, ['<tool_call>{"name": "ad'], is_complete=False) == [
        ("content", '<tool_call>{"name": "ad')
    ]


@pytest.mark.parametrize("end", ["", "</tool_call>"])
def test_a_call_cut_short_in_its_arguments_is_reported(end: str) -> None:
    splitter = ChannelSplitter(JSON_CALLS)
    told = splitter.push('<tool_call>{"name": "add", "arguments": {"a": 1' + end)
    told += splitter.flush(is_complete=False)

    assert merged(told) == [(0, "add", '{"a": 1')]
    assert (splitter.num_whole_calls, splitter.incomplete_calls) == (0, (0,))


def test_a_json_call_that_is_whole_needs_no_end_marker() -> None:
    splitter = ChannelSplitter(JSON_CALLS)
    splitter.push(f"<tool_call>{ADD}")
    splitter.flush(is_complete=False)

    assert splitter.num_whole_calls == 1


def test_what_stands_behind_a_calls_arguments_is_not_lost() -> None:
    assert split(JSON_CALLS, [f"<tool_call>{ADD} and more</tool_call>"]) == [
        (0, "add", ADD_ARGUMENTS),
        ("content", "} and more"),
    ]


MARKED = '{"name": "say", "arguments": {"text": "a</tool_call>b<tool_call>"}}'
MARKED_ARGUMENTS = '{"text": "a</tool_call>b<tool_call>"}'


def test_an_end_marker_in_a_string_of_the_call_is_a_part_of_it() -> None:
    """The JSON says where the call ends; calls behind it are told as ever."""
    text = f"a<tool_call>{MARKED}</tool_call>b<tool_call>\n{ADD}\n</tool_call>"

    expected = [
        ("content", "a"),
        (0, "say", MARKED_ARGUMENTS),
        ("content", "b"),
        (1, "add", ADD_ARGUMENTS),
    ]
    assert split(JSON_CALLS, [text]) == split(JSON_CALLS, list(text)) == expected


def test_what_may_be_the_end_of_a_broken_call_is_held_until_the_call_is_whole() -> None:
    """Up to the marker, arguments come as they grow; behind it, when it is certain."""
    splitter = ChannelSplitter(JSON_CALLS)
    head = '<tool_call>{"name": "say", "arguments": {"text": "'

    assert merged(splitter.push(head + "a</tool_")) == [(0, "say", '{"text": "a')]
    assert merged(splitter.push('call>b", "c": ')) == []
    assert merged(splitter.push("1}}")) == [(0, "say", '</tool_call>b", "c": 1}')]
    assert merged(splitter.push("</tool_call>d")) == [("content", "d")]


@pytest.mark.parametrize(
    ("text", "call"),
    [
        ('{"name": "f", "text": "</tool_call>"}', (0, "f", "{}")),
        ('[{"name": "f"}, "</tool_call>"]', None),
        ('{"a": "</tool_call>"}', None),
    ],
)
def test_a_marker_in_a_string_ends_no_text_that_comes_whole_either(
    text: str, call: tuple | None
) -> None:
    """What is no call is content with all that stood in it."""
    whole = f"<tool_call>{text}</tool_call>"

    assert split(JSON_CALLS, [whole]) == [call or ("content", whole)]


@pytest.mark.parametrize("behind", ["\n", '\n"}}', " so", '", no', '"}', ""])
def test_a_call_whose_string_has_no_end_ends_at_the_first_marker(behind: str) -> None:
    """Where the text turns out to be no JSON, what follows the marker is told for itself."""
    text = f'<tool_call>{{"name": "f", "arguments": {{"a": "b}}}}</tool_call>{behind}'
    more = f"<tool_call>{ADD}</tool_call>c"

    for pieces in ([text + more], list(text + more)):
        told = split(JSON_CALLS, pieces, is_complete=False)
        assert told[0] == (0, "f", '{"a": "b}}')
        assert told[-2:] == [(1, "add", ADD_ARGUMENTS), ("content", "c")]


def test_a_marker_in_a_string_that_the_text_breaks_off_in_is_an_end() -> None:
    """Nothing of what was held is lost."""
    splitter = ChannelSplitter(JSON_CALLS)
    told = splitter.push('<tool_call>{"name": "f", "arguments": {"a": "b</tool_call>c')
    told += splitter.flush(is_complete=False)

    assert merged(told) == [(0, "f", '{"a": "b'), ("content", "c")]
    assert splitter.incomplete_calls == (0,)


def test_a_long_row_of_calls_that_break_off_costs_no_more_than_its_length() -> None:
    """Held text is looked at again once, not once for each call in it."""
    unit = '<tool_call>{"name": "f", "arguments": {"a": "</tool_call>'
    text = unit * 20_000

    told = split(JSON_CALLS, [text], is_complete=False)

    assert len(told) == 20_000


def test_one_call_is_told_where_one_is_allowed_and_nothing_behind_it() -> None:
    """The end of the call is the end; other calls of the same text are left out, too."""
    text = f"a<tool_call>{MARKED}</tool_call>b<tool_call>{ADD}</tool_call>"
    splitter = ChannelSplitter(JSON_CALLS, ends_after_call=True)
    told = splitter.push(text[: text.index("b<tool_call>{") - 1])
    assert not splitter.is_over
    told += splitter.push(text[text.index("b<tool_call>{") - 1 :])
    assert splitter.is_over
    told += splitter.push(text) + splitter.flush(is_complete=True)
    assert merged(told) == [("content", "a"), (0, "say", MARKED_ARGUMENTS)]

    words = "<tool_call>a=1; b=2</tool_call>c"
    for family, whole in ((WORD_CALLS, words), (ENDLESS_CALLS, words[:19])):
        assert split(family, list(whole), ends_after_call=True) == [(0, "a", '{"v": "1"}')]


def test_calls_of_other_kinds_come_when_they_are_complete() -> None:
    splitter = ChannelSplitter(WORD_CALLS)

    assert splitter.push("<tool_call>a=1; b=2") == []
    assert merged(splitter.push("</tool_call>c")) == [
        (0, "a", '{"v": "1"}'),
        (1, "b", '{"v": "2"}'),
        ("content", "c"),
    ]


def test_a_call_of_another_kind_is_whole_only_if_the_model_ended_it() -> None:
    text = ["<tool_call>a=1"]

    assert split(ENDLESS_CALLS, text, is_complete=True) == [(0, "a", '{"v": "1"}')]
    assert split(ENDLESS_CALLS, text, is_complete=False) == [("content", "<tool_call>a=1")]


# Split invariance, stops and channels together.

FRAGMENTS = [
    "<think>", "</think>", "<tool_call>", "</tool_call>", ADD, "a=1", "a=1; b=2", '{"name": "f"}',
    '{"name": "f", "arguments": {"x": [1, {"y": "\\\\"}]', "<thi", "</", "<tool", "END", "EN", "ENDED",
    f"<tool_call>{ADD}</tool_call>", "<tool_call>a=1; b=2</tool_call>", "D", "word ", "é🙂", "\n", "{", "}", '"', "\\",
    f"<tool_call>{MARKED}</tool_call>", '<tool_call>{"name": "f", "arguments": {"x": "</tool_call>', '"}}', '", "y": [1, "',
]  # fmt: skip
STOPS = ("END", "ENDED", "NDE", "\n\n", "</x>", "ed<")


def whole_pipe(family, settings: dict, pieces: Sequence[str]) -> tuple:
    """Return all that comes out of stop strings and splitter, and how it ended."""
    stops, splitter = StopMatcher(STOPS), ChannelSplitter(family, **settings)
    segments: list[Segment] = []
    matched = None
    for piece in pieces:
        output = stops.push(piece)
        segments += splitter.push(output.text)
        matched = output.matched
        if matched is not None:
            break
    else:
        segments += splitter.push(stops.flush())
    segments += splitter.flush(is_complete=matched is None)
    return merged(segments), matched, splitter.num_whole_calls, splitter.incomplete_calls


def random_cut(draw: random.Random, text: str) -> list[str]:
    cuts = sorted(draw.choices(range(len(text) + 1), k=draw.randint(0, 12)))
    return [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]


def check_random_cuts(num_cuts: int) -> None:
    draw = random.Random(5)
    num_stopped = num_calls = num_reasoned = num_marked = 0
    for _ in range(num_cuts):
        text = "".join(draw.choices(FRAGMENTS, k=draw.randint(1, 12)))
        family = draw.choice([JSON_CALLS, WORD_CALLS, ENDLESS_CALLS])
        start = draw.choice([Mode.CONTENT, Mode.CONTENT, Mode.REASONING])
        settings = {"start": start, "ends_after_call": draw.random() < 0.2}

        expected = whole_pipe(family, settings, list(text))
        assert whole_pipe(family, settings, random_cut(draw, text)) == expected, text
        assert whole_pipe(family, settings, [text]) == expected, text

        runs, matched, num_whole, _ = expected
        num_stopped += matched is not None
        num_calls += num_whole > 0
        num_reasoned += any(run[0] == "reasoning" for run in runs)
        num_marked += any("</tool_call>" in run[2] for run in runs if len(run) == 3)
    assert min(num_stopped, num_calls, num_reasoned, num_marked) > 0.05 * num_cuts


def test_the_same_comes_out_however_the_text_is_cut() -> None:
    check_random_cuts(500)


@pytest.mark.long
def test_the_same_comes_out_however_the_text_is_cut_5_000_times() -> None:
    check_random_cuts(5000)


def test_content_and_reasoning_and_the_markers_between_them_are_the_text() -> None:
    draw = random.Random(6)
    marks = {"reasoning": ("<think>", "</think>"), "content": ("", "")}
    for _ in range(300):
        fragments = [part for part in FRAGMENTS if "tool" not in part]
        text = "".join(draw.choices(fragments, k=draw.randint(1, 12)))
        rebuilt = ""
        for kind, run in split(JSON_CALLS, random_cut(draw, text)):
            rebuilt += marks[kind][0] + run + marks[kind][1]
        plain = text.replace("<think></think>", "")

        # An unfinished thought has no end, a thought in a thought no beginning of its own.
        assert rebuilt.replace("<think>", "").replace("</think>", "") == (
            plain.replace("<think>", "").replace("</think>", "")
        )
