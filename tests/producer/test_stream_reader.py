import random

import pytest
from headwater.producer.errors import StreamDiverged, StreamGap
from headwater.producer.stream_reader import AttemptOpened, Ended, Output, Restart, StreamReader
from headwater.schemas import (
    Cancelled,
    Delta,
    DeltaPart,
    EntryId,
    Event,
    PositionLogprobs,
    PromptPart,
    Released,
    Restarted,
    Resumed,
    Started,
    StreamEntry,
    TextSpan,
)

STARTED = Started(worker_id="w", sampler_version=1)
RESUMED = Resumed(worker_id="w", sampler_version=1)
RESTARTED = Restarted(worker_id="w", sampler_version=1)


def delta(start: int, tokens: str, text_start: int = -1, text: str = "", choice: int = 0) -> Delta:
    """Token ids are characters' numbers; without *text* the tokens are their own text."""
    span = TextSpan(text_start=start, text=tokens)
    if text_start >= 0:
        span = TextSpan(text_start=text_start, text=text)
    part = DeltaPart(choice=choice, start=start, token_ids=tuple(map(ord, tokens)), text=(span,))
    return Delta(parts=(part,))


def entry(at: str, event: Event) -> StreamEntry:
    return StreamEntry(EntryId.parse(at), event)


def read(*entries: tuple[str, Event]) -> str:
    """Return what a consumer shows: outputs joined, discarded at a restart."""
    reader, shown = StreamReader(), ""
    for at, event in entries:
        for item in reader.feed(entry(at, event)):
            if isinstance(item, Restart):
                shown = ""
            elif isinstance(item, Output):
                shown += "".join(span.text for span in item.text)
    return shown


def test_deltas_come_out_in_order() -> None:
    assert read(("1-0", STARTED), ("1-1", delta(0, "ab")), ("1-2", delta(2, "c"))) == "abc"


def test_a_resumed_attempt_continues_the_text() -> None:
    assert (
        read(("1-0", STARTED), ("1-1", delta(0, "ab")), ("3-0", RESUMED), ("3-1", delta(2, "c")))
        == "abc"
    )


def test_an_overlap_that_was_shown_is_dropped() -> None:
    assert (
        read(("1-0", STARTED), ("1-1", delta(0, "abc")), ("2-0", RESUMED), ("2-1", delta(1, "bcd")))
        == "abcd"
    )


def test_an_overlap_that_brings_nothing_new_gives_no_item() -> None:
    reader = StreamReader()
    for at, event in [("1-0", STARTED), ("1-1", delta(0, "abc")), ("2-0", RESUMED)]:
        reader.feed(entry(at, event))

    assert reader.feed(entry("2-1", delta(0, "ab"))) == []


@pytest.mark.parametrize("fence", ["2-0", "1-2"])
def test_a_restart_discards_what_was_shown(fence: str) -> None:
    after = "2-1" if fence == "2-0" else "1-3"

    assert (
        read(("1-0", STARTED), ("1-1", delta(0, "abc")), (fence, RESTARTED), (after, delta(0, "x")))
        == "x"
    )


def test_a_hand_back_leaves_the_text_as_it_is() -> None:
    assert (
        read(
            ("1-0", STARTED),
            ("1-1", delta(0, "a")),
            ("1-2", Released(reason="drain")),
            ("2-0", RESUMED),
            ("2-1", delta(1, "b")),
        )
        == "ab"
    )


def test_choices_have_positions_of_their_own() -> None:
    assert (
        read(("1-0", STARTED), ("1-1", delta(0, "ab")), ("1-2", delta(0, "xy", choice=1))) == "abxy"
    )


def test_text_that_is_held_back_comes_with_a_later_token() -> None:
    assert (
        read(("1-0", STARTED), ("1-1", delta(0, "ab", 0, "")), ("1-2", delta(2, "c", 0, "abc")))
        == "abc"
    )


@pytest.mark.parametrize(
    ("last", "event"),
    [
        ("1-3", delta(2, "c")),
        ("2-1", delta(2, "c")),
        ("2-0", delta(2, "c")),
        ("1-1", delta(2, "c")),
        ("1-2", delta(3, "d")),
        ("1-2", delta(2, "c", 3, "d")),
    ],
    ids=["number skipped", "fence missing", "no fence", "number again", "token hole", "text hole"],
)
def test_a_hole_is_an_error(last: str, event: Event) -> None:
    with pytest.raises(StreamGap):
        read(("1-0", STARTED), ("1-1", delta(0, "ab")), (last, event))


def test_a_stream_without_its_beginning_is_an_error() -> None:
    with pytest.raises(StreamGap):
        read(("1-4", delta(2, "c")))


@pytest.mark.parametrize("again", [delta(1, "X"), delta(1, "b", 0, "aX")], ids=["token", "text"])
def test_an_overlap_that_differs_is_an_error(again: Event) -> None:
    with pytest.raises(StreamDiverged):
        read(("1-0", STARTED), ("1-1", delta(0, "ab")), ("2-0", RESUMED), ("2-1", again))


def test_there_is_one_end_and_nothing_after_it() -> None:
    reader = StreamReader()
    reader.feed(entry("1-0", STARTED))

    assert reader.feed(entry("1-1", Cancelled())) == [Ended(EntryId(1, 1), Cancelled())]
    assert reader.feed(entry("2-0", RESUMED)) == []
    assert reader.feed(entry("2-1", Cancelled())) == []


def test_an_attempt_is_announced() -> None:
    assert StreamReader().feed(entry("1-0", STARTED)) == [AttemptOpened(EntryId(1, 0), STARTED)]


def test_however_attempts_cut_and_repeat_a_text_it_comes_out_once() -> None:
    for seed in range(200):
        dice = random.Random(seed)
        text = "".join(dice.choices("añ漢🙂\r\n", k=dice.randrange(1, 40)))
        entries: list[tuple[str, Event]] = []
        published = 0
        for attempt in range(1, dice.randrange(2, 6)):
            entries.append((f"{attempt}-0", STARTED if attempt == 1 else RESUMED))
            position = dice.randrange(published + 1)
            for seq in range(1, dice.randrange(1, 6)):
                end = dice.randrange(position, len(text) + 1)
                entries.append((f"{attempt}-{seq}", delta(position, text[position:end])))
                position = end
                published = max(published, end)

        assert read(*entries) == text[:published]


def test_an_overlap_is_dropped_with_its_logprobs() -> None:
    def with_logprobs(start: int, tokens: range) -> Delta:
        told = tuple(PositionLogprobs(token_id=i, logprob=-1.0, text="") for i in tokens)
        part = DeltaPart(choice=0, start=start, token_ids=tuple(tokens), logprobs=told)
        return Delta(parts=(part,))

    reader = StreamReader()
    entries = [
        ("1-0", STARTED),
        ("1-1", with_logprobs(0, range(2))),
        ("2-0", RESUMED),
        ("2-1", with_logprobs(0, range(4))),
    ]
    items = [item for at, event in entries for item in reader.feed(entry(at, event))]
    outputs = [item for item in items if isinstance(item, Output)]
    assert [each.token_id for out in outputs for each in out.logprobs or ()] == [0, 1, 2, 3]


def prompt_delta(start: int, tokens: str) -> Delta:
    positions = tuple(
        PositionLogprobs(token_id=ord(token), logprob=-1.0, text=token) for token in tokens
    )
    prompt = PromptPart(start=start, logprobs=positions)
    return Delta(parts=(DeltaPart(choice=0, start=0, token_ids=(), prompt=prompt),))


def read_prompt(*entries: tuple[str, Event]) -> str:
    """Return the prompt's tokens as a consumer gets them, discarded at a restart."""
    reader, shown = StreamReader(), ""
    for at, event in entries:
        for item in reader.feed(entry(at, event)):
            shown = "" if isinstance(item, Restart) else shown
            if isinstance(item, Output) and item.prompt is not None:
                assert item.prompt.start == len(shown) + 1
                shown += "".join(each.text for each in item.prompt.logprobs)
    return shown


def test_each_position_of_a_prompt_comes_out_once() -> None:
    """What a later attempt tells again is dropped, after a restart all counts anew."""
    first = [("1-0", STARTED), ("1-1", prompt_delta(1, "abc")), ("1-2", prompt_delta(4, "d"))]
    again = [("2-0", RESUMED), ("2-1", prompt_delta(3, "cdef")), ("2-2", prompt_delta(1, "ab"))]
    assert read_prompt(*first) == "abcd"
    assert read_prompt(*first, *again) == "abcdef"
    anew = [("3-0", RESTARTED), ("3-1", prompt_delta(1, "ab"))]
    assert read_prompt(*first, *again, *anew) == "ab"


def test_a_hole_in_a_prompt_and_another_prompt_raise() -> None:
    """Positions that are missing, or that hold another token than before, are errors."""
    start = [("1-0", STARTED), ("1-1", prompt_delta(1, "ab"))]
    with pytest.raises(StreamGap, match="prompt token 2 is missing"):
        read_prompt(*start, ("1-2", prompt_delta(4, "d")))
    with pytest.raises(StreamDiverged, match="prompt token 1 was 98"):
        read_prompt(*start, ("1-2", prompt_delta(2, "x")))
