"""A choice's text by channel: special tokens, the prompt's part, ends, and later attempts."""

import random
from collections import defaultdict

import pytest
from headwater.schemas import Channel, DeltaPart, FinishReason, StreamMode, ToolCall
from headwater.worker.text import SequenceText, Stop, TextDiverged, Vocabulary
from tokenizers import Tokenizer, decoders, models

from tests.worker.text.families import ENDLESS_CALLS, JSON_CALLS

CALL = '{"name": "add", "arguments": {"a": 1}}'


OUTPUT = [
    "<think>", "h", "m <", "/thi", "s", "</think>", "a<th", "b", "<tool_call>", '{"name": "a',
    'dd", "arguments": {', '"a": ', "1}}", "</tool_call>", "c", "<tool_call>", "oops",
    "</tool_call>", "d", "<tool_call>", CALL, "</tool_call>", "<eos>",
]  # fmt: skip

WORDS = ["seed", "hm", "Yes", ".", "Yes.", "x", "a=", "b", "hi", "half a ", "what is <think>", "a"]
WORDS += ["no template", ", ", "so", "oops", "END", "<tool_", CALL, CALL[:-4]]
WORDS += ["}</tool_call> END more", CALL[:-1]]


class Model:
    """A vocabulary of given pieces in which every marker is a special token."""

    def __init__(self) -> None:
        special = ["<eos>", "<user>", "<assistant>", "<quote>", *sorted(JSON_CALLS.markers)]
        pieces = dict.fromkeys(piece for piece in [*WORDS, *OUTPUT] if piece not in special)
        vocab = {piece: index for index, piece in enumerate(pieces)}
        self.tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
        self.tokenizer.decoder = decoders.Fuse()
        self.tokenizer.add_special_tokens(special)

    def ids(self, *pieces: str) -> list[int]:
        token_ids = [self.tokenizer.token_to_id(piece) for piece in pieces]
        assert None not in token_ids, pieces
        return token_ids

    def _settings(self, settings):
        return {"family": JSON_CALLS, "eos_token_ids": self.ids("<eos>")} | settings

    def text(self, job, **settings) -> SequenceText:
        return SequenceText(Vocabulary(self.tokenizer), job, **self._settings(settings))

    def resume(self, job, parts, **settings) -> SequenceText:
        vocabulary = Vocabulary(self.tokenizer)
        return SequenceText.resume(vocabulary, job, parts, **self._settings(settings))


@pytest.fixture
def model() -> Model:
    return Model()


def push_all(text: SequenceText, token_ids: list[int]) -> Stop | None:
    return next((stop for each in token_ids if (stop := text.push(each)) is not None), None)


def told(*parts: DeltaPart | None) -> dict:
    """Join spans by channel and call, checking every position."""
    texts = defaultdict(str)
    for part in parts:
        for span in part.text if part else ():
            key = span.channel if span.index is None else span.index
            assert span.text_start == len(texts[key])
            assert (span.name is not None) == (span.index is not None and not texts[key])
            texts[key] += span.text
    return dict(texts)


def test_markers_that_are_special_tokens_split_the_text(model, make_job) -> None:
    text = model.text(make_job())
    push_all(text, model.ids("<think>", "hm", "</think>", "Yes."))

    assert told(text.take()) == {Channel.REASONING: "hm", Channel.CONTENT: "Yes."}


def test_a_job_can_ask_for_its_text_unsplit(model, make_job) -> None:
    text = model.text(make_job(split_channels=False))
    push_all(text, model.ids("<think>", "hm", "</think>", "Yes."))

    assert told(text.take()) == {Channel.CONTENT: "hmYes."}


def test_special_tokens_have_their_text_inside_a_tool_call_only(model, make_job) -> None:
    job = make_job()
    text = model.text(job, family=ENDLESS_CALLS)
    push_all(text, model.ids("<quote>", "x", "<tool_call>", "a=", "<quote>", "b", "<eos>"))

    assert told(text.take()) == {Channel.CONTENT: "x", 0: '{"v": "<quote>b"}'}


@pytest.mark.parametrize(
    ("prompt", "channel"),
    [
        (["<user>", "hi", "<assistant>", "<think>"], Channel.REASONING),
        (["<user>", "hi", "<assistant>", "<think>", "half a "], Channel.REASONING),
        (["<user>", "hi", "<assistant>", "<think>", "hm", "</think>"], Channel.CONTENT),
        (["<user>", "what is <think>", "<think>", "<assistant>"], Channel.CONTENT),
        (["<user>", "hi", "<assistant>", "<tool_call>"], Channel.CONTENT),
        (["no template", "<think>"], Channel.REASONING),
    ],
)
def test_the_models_own_turn_in_the_prompt_decides_where_the_text_begins(
    model, make_job, prompt, channel
) -> None:
    text = model.text(make_job(prompt=model.ids(*prompt)))
    push_all(text, model.ids("a"))

    assert told(text.take()) == {channel: "a"}


def test_reasoning_tokens_are_counted_without_their_markers(model, make_job) -> None:
    text = model.text(make_job())
    push_all(text, model.ids("<think>", "hm", ", ", "so", "</think>", "Yes", ".", "<eos>"))

    assert text.num_reasoning_tokens == 3


def test_a_choice_that_called_a_tool_ends_for_tool_calls(model, make_job) -> None:
    text = model.text(make_job())
    stop = push_all(text, model.ids("<tool_call>", CALL, "</tool_call>", "<eos>"))

    assert stop == Stop(FinishReason.TOOL_CALLS)
    assert text.stop == stop


@pytest.mark.parametrize(
    ("pieces", "fields", "expected"),
    [
        (["<tool_call>", CALL, "</tool_call>"], {"max_tokens": 3}, Stop(FinishReason.LENGTH)),
        (["<tool_call>", CALL[:-4], "<eos>"], {}, Stop(FinishReason.STOP)),
        (["<tool_call>", "oops", "</tool_call>", "<eos>"], {}, Stop(FinishReason.STOP)),
        (
            ["<tool_call>", CALL, "</tool_call>", "END"],
            {"stop": ("END",)},
            Stop(FinishReason.TOOL_CALLS, "END"),
        ),
    ],
)
def test_other_ends_keep_their_reason(model, make_job, pieces, fields, expected) -> None:
    text = model.text(make_job(**fields))

    assert push_all(text, model.ids(*pieces)) == expected


SINGLE = {"parallel_tool_calls": False}
ONE_CALL = ["a", "<tool_call>", CALL, "</tool_call>"]


@pytest.mark.parametrize(
    ("pieces", "fields", "expected"),
    [
        (ONE_CALL, {}, Stop(FinishReason.TOOL_CALLS)),
        # The end of the call comes before what its last token holds behind it.
        (["a", "<tool_call>", CALL[:-1], "}</tool_call> END more"], {}, None),
        (["a", "<tool_call>", CALL[:-1], "}</tool_call> END more"], {"stop": ("END",)}, None),
        (ONE_CALL, {"max_tokens": 4}, Stop(FinishReason.TOOL_CALLS)),
        (ONE_CALL, {"ignore_eos": True}, Stop(FinishReason.TOOL_CALLS)),
        (
            ONE_CALL,
            {"stop": ("</tool_call>",), "include_stop_str": True},
            Stop(FinishReason.TOOL_CALLS, "</tool_call>"),
        ),
        (
            ["<think>", "hm", *ONE_CALL],
            {},
            Stop(FinishReason.TOOL_CALLS),
        ),
    ],
)
def test_a_choice_that_may_call_once_ends_with_its_call(
    model, make_job, pieces, fields, expected
) -> None:
    """It is the call's last token that ends it, and nothing behind the call is told."""
    text = model.text(make_job(**SINGLE, **fields))
    token_ids = model.ids(*pieces)

    assert push_all(text, token_ids[:-1]) is None
    assert text.push(token_ids[-1]) == (expected or Stop(FinishReason.TOOL_CALLS))
    channel = Channel.REASONING if "hm" in pieces else Channel.CONTENT
    assert told(text.take()) == {channel: "hma" if "hm" in pieces else "a", 0: '{"a": 1}'}


def test_a_broken_call_is_the_only_one_of_a_choice_that_may_call_once(model, make_job) -> None:
    """Its arguments are out: another call would be a second one."""
    text = model.text(make_job(**SINGLE))
    stop = push_all(text, model.ids("<tool_call>", CALL[:-4], "</tool_call>", "c"))

    assert stop == Stop(FinishReason.STOP)
    assert text.incomplete_tool_calls == (0,)


def test_what_is_no_call_does_not_end_a_choice_that_may_call_once(model, make_job) -> None:
    """A text that can't be parsed is content; the call may still come."""
    text = model.text(make_job(**SINGLE))
    pieces = ["<tool_call>", "oops", "</tool_call>", "d", "<tool_call>", CALL, "</tool_call>"]

    assert push_all(text, model.ids(*pieces)) == Stop(FinishReason.TOOL_CALLS)
    assert told(text.take()) == {Channel.CONTENT: "<tool_call>oops</tool_call>d", 0: '{"a": 1}'}


@pytest.mark.parametrize("num_published", range(1, len(ONE_CALL) + 1))
def test_a_later_attempt_starts_no_second_call(model, make_job, num_published) -> None:
    """Also where the first one had published all of the call, and not its end."""
    job, token_ids = make_job(**SINGLE), model.ids(*ONE_CALL)
    first = model.text(job)
    push_all(first, token_ids[:num_published])
    part = first.take()

    second = model.resume(job, [part])
    assert (second.stop is not None) == (num_published == len(ONE_CALL))
    push_all(second, token_ids[num_published:])

    assert second.stop == Stop(FinishReason.TOOL_CALLS)
    assert told(part, second.take()) == {Channel.CONTENT: "a", 0: '{"a": 1}'}


def test_a_call_that_was_cut_short_is_named_among_the_incomplete_ones(model, make_job) -> None:
    text = model.text(make_job(max_tokens=2))
    push_all(text, model.ids("<tool_call>", CALL[:-4]))

    assert told(text.take()) == {0: '{"a":'}
    assert text.incomplete_tool_calls == (0,)


@pytest.mark.parametrize("ending", ["<eos>", "finish", "length", "END"])
def test_every_exit_lets_out_what_the_channels_hold(model, make_job, ending) -> None:
    text = model.text(make_job(max_tokens=3, stop=("END",)))
    push_all(text, model.ids("a", "<tool_"))
    if ending == "finish":
        text.finish()
    else:
        push_all(text, model.ids({"length": "b"}.get(ending, ending)))

    assert told(text.take())[Channel.CONTENT] == "a<tool_" + ("b" if ending == "length" else "")


def test_stop_strings_see_the_markers_and_reasoning_too(model, make_job) -> None:
    text = model.text(make_job(stop=("m</th",)))
    stop = push_all(text, model.ids("<think>", "hm", "</think>", "x"))

    assert stop == Stop(FinishReason.STOP, "m</th")
    assert told(text.take()) == {Channel.REASONING: "h"}


def test_a_final_job_keeps_its_channels_for_the_end(model, make_job) -> None:
    text = model.text(make_job(stream=StreamMode.FINAL))
    push_all(text, model.ids("<think>", "hm", "</think>", "Yes.", "<tool_call>", CALL, "<eos>"))

    assert text.take().text == ()
    assert (text.whole_text, text.whole_reasoning) == ("Yes.", "hm")
    assert text.tool_calls == (ToolCall(index=0, name="add", arguments='{"a": 1}'),)


@pytest.mark.parametrize("stream", list(StreamMode))
def test_a_later_attempt_goes_on_wherever_the_last_one_ended(model, make_job, stream) -> None:
    job, token_ids = make_job(stream=stream, stop=("ENDED",)), model.ids(*OUTPUT)
    whole = model.text(job)
    push_all(whole, token_ids)
    whole_told = told(whole.take())
    draw = random.Random(3)
    for num_published in range(len(token_ids)):
        first, parts = model.text(job), []
        for token_id in token_ids[:num_published]:
            first.push(token_id)
            if draw.random() < 0.5:
                parts.append(first.take())
        parts.append(first.take())
        parts = [part for part in parts if part is not None]

        second = model.resume(job, parts)
        stop = push_all(second, token_ids[num_published:])

        assert stop == Stop(FinishReason.TOOL_CALLS)
        assert told(*parts, second.take()) == whole_told
        assert second.num_reasoning_tokens == whole.num_reasoning_tokens
        assert (second.whole_text, second.tool_calls) == (whole.whole_text, whole.tool_calls)


def test_published_calls_of_another_name_cannot_be_continued(model, make_job) -> None:
    text = model.text(make_job())
    push_all(text, model.ids("<tool_call>", CALL[:-4]))
    part = text.take()
    span = part.text[0].model_copy(update={"name": "sub"})

    with pytest.raises(TextDiverged, match="sub"):
        model.resume(make_job(), [part.model_copy(update={"text": (span,)})])


def test_text_that_was_published_in_another_channel_cannot_be_continued(model, make_job) -> None:
    text = model.text(make_job(split_channels=False))
    push_all(text, model.ids("<think>", "hm"))

    with pytest.raises(TextDiverged, match="content differs at character 0"):
        model.resume(make_job(), [text.take()])
