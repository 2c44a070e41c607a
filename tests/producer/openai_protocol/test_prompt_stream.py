"""A prompt is told in pieces, each once, and the choices' own text waits for it."""

from typing import Any

from headwater.producer.client import new_job
from headwater.producer.openai_protocol.echo import Echo
from headwater.producer.openai_protocol.prompt_stream import PromptStream
from headwater.schemas import PositionLogprobs, PromptPart


def part(start: int, *texts: str) -> PromptPart:
    positions = (PositionLogprobs(token_id=7, logprob=-1.0, text=text) for text in texts)
    return PromptPart(start=start, logprobs=tuple(positions))


def stream(num_tokens: int, echo: Echo | None, **settings: Any) -> PromptStream:
    job = new_job("m", [1] * num_tokens, max_tokens=4, logprobs=0)
    return PromptStream(job, echo, **({"tells_prompt": False} | settings))


def test_an_echo_with_logprobs_comes_with_its_tokens() -> None:
    """The last piece holds what the tokens don't: a token of half a character shows as another."""
    prompt = stream(4, Echo("abé!", "ab"))
    pieces = [prompt.first(), prompt.take(part(1, "�"))]
    assert not prompt.is_echoed
    pieces.append(prompt.take(part(2, "�", "!")))

    assert prompt.is_echoed
    assert [piece.text for piece in pieces if piece] == ["ab", "é", "!"]
    offsets = [piece.logprobs["text_offset"] for piece in pieces if piece and piece.logprobs]
    assert offsets == [[0], [2], [3, 4]]


def test_a_token_that_the_tokenizer_put_first_is_no_part_of_the_text() -> None:
    """It has its place in the logprobs only."""
    prompt = stream(2, Echo("ab", "<s>"))
    first, last = prompt.first(), prompt.take(part(1, "ab"))

    assert (first.text, first.logprobs and first.logprobs["tokens"]) == ("", ["<s>"])
    assert last is not None
    assert (last.text, last.logprobs and last.logprobs["text_offset"]) == ("ab", [0])


def test_what_a_job_that_starts_over_tells_again_is_left_out() -> None:
    """Positions count, not entries."""
    prompt = stream(4, Echo("abcd", "a"), tells_prompt=True)
    prompt.first()
    assert prompt.take(part(1, "b", "c")) is not None
    assert prompt.take(part(1, "b", "c")) is None
    again = prompt.take(part(2, "c", "d"))

    assert again is not None
    assert (again.text, len(again.prompt_logprobs or ())) == ("d", 1)
    assert prompt.is_echoed


def test_an_echo_of_one_token_is_whole_at_once() -> None:
    """No position of it has a logprob."""
    prompt = stream(1, Echo("a", "a"))
    assert prompt.first().text == "a"
    assert prompt.is_echoed


def test_without_an_echo_nothing_waits() -> None:
    """VLLM's field stands beside the text."""
    prompt = stream(3, None, tells_prompt=True)
    assert prompt.is_echoed
    assert prompt.first().prompt_logprobs == [None]
    told = prompt.take(part(1, "b"))
    assert told is not None
    assert (told.text, told.logprobs, len(told.prompt_logprobs or ())) == ("", None, 1)
