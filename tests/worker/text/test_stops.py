"""No part of a stop string gets out, and nothing else is held for longer than it must be."""

import random

import pytest
from headwater.worker.text import StopMatcher, StopOutput
from hypothesis import given, settings
from hypothesis import strategies as st


def naive(text: str, stops: list[str]) -> StopOutput:
    """Read character by character; stop when the text ends with a stop string."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            longest = max(found, key=len)
            return StopOutput(text[: end - len(longest)], longest)
    return StopOutput(text)


def naive_held(text: str, stops: list[str]) -> int:
    """Return the length of the longest end of *text* that begins a stop string."""
    heads = [stop[:length] for stop in stops for length in range(1, len(stop))]
    return max((len(head) for head in heads if text.endswith(head)), default=0)


def run(stops: list[str], pieces: list[str]) -> StopOutput:
    """Push *pieces*; after each, exactly the longest possible head of a stop is held."""
    matcher = StopMatcher(tuple(stops))
    seen = out = ""
    for piece in pieces:
        seen += piece
        output = matcher.push(piece)
        out += output.text
        if output.matched is not None:
            return StopOutput(out, output.matched)
        assert out == seen[: len(seen) - naive_held(seen, stops)]
    return StopOutput(out + matcher.flush())


def cut(draw: random.Random, text: str) -> list[str]:
    cuts = sorted(draw.choices(range(len(text) + 1), k=draw.randint(0, 6)))
    return [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]


def check_random_texts(num_cases: int) -> None:
    draw = random.Random(11)
    num_matches = 0
    for _ in range(num_cases):
        alphabet = draw.choice(["ab", "abc", "aé🙂"])
        stops = [
            "".join(draw.choices(alphabet, k=draw.randint(1, 6))) for _ in range(draw.randint(1, 5))
        ]
        text = "".join(draw.choices(alphabet + " ", k=draw.randint(0, 30)))
        expected = naive(text, stops)
        assert run(stops, cut(draw, text)) == expected
        num_matches += expected.matched is not None
    assert num_cases * 0.2 < num_matches < num_cases


def test_every_cut_of_a_random_text_gives_what_a_reader_by_character_sees():
    check_random_texts(2_000)


@pytest.mark.long
def test_every_cut_of_twenty_thousand_random_texts_gives_what_a_reader_by_character_sees():
    check_random_texts(20_000)


@settings(max_examples=200, derandomize=True)
@given(
    st.lists(st.text("aab\n", min_size=1, max_size=8), min_size=1, max_size=6),
    st.lists(st.text("aab\n", max_size=7), max_size=8),
)
def test_overlapping_stops_in_any_pieces(stops, pieces):
    assert run(stops, pieces) == naive("".join(pieces), stops)


@pytest.mark.parametrize(
    ("stops", "pieces", "text", "matched"),
    [
        # mlx-lm, vLLM and others let "own" out.
        (["own fox"], ["The quick br", "own", " fox"], "The quick br", "own fox"),
        (["own fox"], ["The quick br", "own", " fox", " jumps"], "The quick br", "own fox"),
        (["DEFGHIJ"], ["AB", "CDEF", "GH", "IJ"], "ABC", "DEFGHIJ"),
        # Tokenized once, a stop string misses other segmentations.
        (["fox"], ["a", " f", "ox"], "a ", "fox"),
        # Inside a token, not at its end.
        (["END"], ["the ", "ENDing"], "the ", "END"),
        # A stop string that begins inside another one's head.
        (["aab"], ["aaa", "ab"], "aa", "aab"),
        (["abcd", "bc"], ["ab", "cd"], "a", "bc"),
        # One a prefix of another: the shorter ends first.
        (["STOP", "STOPPED"], ["x STOP", "PED"], "x ", "STOP"),
        # Several end at the same place: the longest.
        (["b", "ab"], ["xab"], "x", "ab"),
        (["\n\n"], ["a\n", "b\n\nc"], "a\nb", "\n\n"),
        (["🙂"], ["a🙂b"], "a", "🙂"),
        ([".*"], ["a.b", ".*"], "a.b", ".*"),
        (["x"], ["x"], "", "x"),
    ],
)
def test_nothing_of_a_stop_string_gets_out(stops, pieces, text, matched):
    assert run(stops, pieces) == StopOutput(text, matched)


def test_text_that_can_be_no_stop_string_is_not_held():
    matcher = StopMatcher(("x" * 40,))
    assert matcher.push("hello").text == "hello"
    assert matcher.push(" wax").text == " wa"
    assert matcher.push("y").text == "xy"


def test_a_held_head_comes_out_at_the_end():
    matcher = StopMatcher(("</stop>",))
    assert matcher.push("Yes.</st").text == "Yes."
    assert matcher.flush() == "</st"
    assert matcher.flush() == ""


def test_a_stop_string_that_may_not_match_is_ordinary_text():
    matcher = StopMatcher(("END", "ENDLESS"))
    assert matcher.push("an END", may_match=False) == StopOutput("an ")
    assert matcher.push(" of END") == StopOutput("END of ", "END")


def test_a_stop_string_let_through_is_not_held_when_it_cant_grow():
    matcher = StopMatcher(("END",))
    assert matcher.push("an END", may_match=False) == StopOutput("an END")


def test_a_stop_string_that_straddles_the_first_place_it_may_match_is_cut_whole():
    matcher = StopMatcher(("own fox",))
    assert matcher.push("br own", may_match=False) == StopOutput("br ")
    assert matcher.push(" fox") == StopOutput("", "own fox")
