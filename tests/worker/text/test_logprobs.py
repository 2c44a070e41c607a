"""What is told of a token: its text, its bytes where they are no text, and never infinity."""

import base64
import math

from headwater.schemas import DeltaPart, PositionLogprobs
from headwater.worker.sequence import TokenLogprobs
from headwater.worker.text import LogprobLog, Vocabulary

from .conftest import byte_level_tokenizer


def vocabulary() -> Vocabulary:
    return Vocabulary(byte_level_tokenizer())


def log(*, keeps_all: bool = False) -> LogprobLog:
    return LogprobLog(vocabulary(), keeps_all=keeps_all)


def test_a_token_that_is_no_whole_character_comes_with_its_bytes() -> None:
    known = vocabulary()
    broken = next(i for i, piece in enumerate(known.pieces) if isinstance(piece, bytes))
    whole = next(i for i, piece in enumerate(known.pieces) if piece == "the")
    entries = LogprobLog(known, keeps_all=False)
    entries.push(broken, TokenLogprobs(-0.5, [broken, whole], [-0.5, -1.5]))
    (entry,) = entries.take()

    assert base64.b64decode(entry.bytes) == known.pieces[broken]
    assert "\ufffd" in entry.text
    assert [(top.token_id, top.logprob) for top in entry.top] == [(broken, -0.5), (whole, -1.5)]
    assert (entry.top[1].text, entry.top[1].bytes) == ("the", None)


def test_a_special_token_is_told_by_name() -> None:
    known = vocabulary()
    end = known.tokenizer.token_to_id("<|im_end|>")
    entries = LogprobLog(known, keeps_all=False)
    entries.push(end, TokenLogprobs(-1.0, [], []))
    assert entries.take()[0].text == "<|im_end|>"


def test_an_id_that_the_tokenizer_does_not_know_has_no_text() -> None:
    entries = log()
    entries.push(100_000, TokenLogprobs(-1.0, [], []))
    assert entries.take()[0].text == ""


def test_minus_infinity_is_told_as_none() -> None:
    entries = log()
    entries.push(5, TokenLogprobs(-math.inf, [6], [-math.inf]))
    (entry,) = entries.take()
    assert entry.logprob is None
    assert entry.top[0].logprob is None
    assert PositionLogprobs.decode(entry.encode()) == entry


def test_each_entry_is_taken_once_and_all_are_kept_for_the_end() -> None:
    entries = log(keeps_all=True)
    for token in (3, 4, 5):
        entries.push(token, TokenLogprobs(-1.0, [], []))
        if token == 4:
            assert [each.token_id for each in entries.take()] == [3, 4]
    assert [each.token_id for each in entries.whole] == [3, 4, 5]
    assert [each.token_id for each in entries.take()] == [5]
    assert entries.take() == ()


def test_a_resumed_log_starts_with_what_was_published() -> None:
    entries = log(keeps_all=True)
    told = tuple(PositionLogprobs(token_id=i, logprob=-1.0, text="") for i in (7, 8))
    entries.resume([DeltaPart(choice=0, start=0, token_ids=(7, 8), logprobs=told)])
    entries.push(9, TokenLogprobs(-2.0, [], []))
    assert [each.token_id for each in entries.whole] == [7, 8, 9]
    assert [each.token_id for each in entries.take()] == [9]
