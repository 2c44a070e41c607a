"""A streamed echo comes before the text of every choice, whichever part is known first."""

import asyncio
import json
from collections.abc import AsyncGenerator, Sequence
from types import SimpleNamespace
from typing import Any

from headwater.producer.api.feed import Feed
from headwater.producer.api.reply_stream import ReplyStream
from headwater.producer.client import new_job
from headwater.producer.openai_protocol.echo import Echo
from headwater.producer.openai_protocol.prompt_stream import PromptStream
from headwater.producer.openai_protocol.replies import Reply
from headwater.producer.openai_protocol.reply_formats import CompletionFormat
from headwater.producer.stream_reader import Ended, Output, Restart, TailItem
from headwater.schemas import (
    ChoiceEnd,
    EntryId,
    Finished,
    FinishReason,
    PositionLogprobs,
    PromptPart,
    Restarted,
    TextSpan,
    Timings,
    Usage,
)


def logprob(text: str) -> PositionLogprobs:
    return PositionLogprobs(token_id=7, logprob=-1.0, text=text)


def output(seq: int, choice: int, text: str, start: int = 0, attempt: int = 1) -> Output:
    span = TextSpan(text_start=start, text=text)
    return Output(EntryId(attempt, seq), choice, start, (7,), (span,), (logprob(text),))


def prompt(seq: int, start: int, *texts: str, is_last: bool = True, attempt: int = 1) -> Output:
    part = PromptPart(start=start, logprobs=tuple(map(logprob, texts)))
    return Output(EntryId(attempt, seq), 0, 0, (), (), None, part, is_last)


def end(seq: int, attempt: int = 1) -> Ended:
    choices = (ChoiceEnd(choice=n, finish_reason=FinishReason.LENGTH) for n in range(2))
    usage = Usage(prompt_tokens=3, completion_tokens=4)
    timings = Timings(total_ms=1)
    finished = Finished(choices=tuple(choices), usage=usage, timings=timings)
    return Ended(EntryId(attempt, seq), finished)


async def tail(items: Sequence[TailItem]) -> AsyncGenerator[TailItem, None]:
    for item in items:
        yield item


def events(items: Sequence[TailItem]) -> list[tuple[str | None, int, str, list[int]]]:
    """Return each event's id, and its choice's number, text, and the places of its tokens."""
    job = new_job("m", [1, 2, 3], max_tokens=4, logprobs=0)
    prompts = {0: PromptStream(job, Echo("abc", "a"), tells_prompt=False)}
    reply = Reply(CompletionFormat(), "m", ["j"], 0, num_choices=2)

    async def read() -> list[bytes]:
        settings = SimpleNamespace(keepalive_s=9.0)
        services: Any = SimpleNamespace(open_feed=lambda _: Feed([tail(items)]), settings=settings)
        stream = ReplyStream(services, reply, prompts, cancels=False)
        return [event async for event in stream.events()]

    *told, done = asyncio.run(read())
    assert done == b"data: [DONE]\n\n"
    return [_parse(event.decode()) for event in told]


def _parse(event: str) -> tuple[str | None, int, str, list[int]]:
    fields = dict(line.split(": ", 1) for line in event.strip().splitlines())
    (choice,) = json.loads(fields["data"])["choices"]
    places = choice["logprobs"]["text_offset"] if choice["logprobs"] else []
    return fields.get("id"), choice["index"], choice["text"], places


OPENING = [(None, 0, "a", [0]), (None, 1, "a", [0])]


def test_a_choice_waits_for_the_echo_of_its_prompt() -> None:
    """No id is sent while an entry's text is held; then the last one's stands for all."""
    told = events(
        [prompt(1, 1, "b"), output(2, 1, "x"), prompt(3, 2, "c"), output(4, 0, "y"), end(5)]
    )
    assert told == [
        *OPENING,
        (None, 0, "b", [1]),
        ("1-1", 1, "b", [1]),
        (None, 0, "c", [2]),
        (None, 1, "c", [2]),
        ("1-3", 1, "x", [3]),
        ("1-4", 0, "y", [3]),
        (None, 0, "", []),
        ("1-5", 1, "", []),
    ]


def test_ids_wait_for_what_is_held() -> None:
    """A client that comes back after one misses nothing."""
    told = events([output(1, 1, "x"), prompt(2, 1, "b"), prompt(3, 2, "c"), end(4)])
    assert [event[0] for event in told] == [*[None] * 6, "1-3", None, "1-4"]
    assert "".join(text for _, index, text, _ in told if index == 1) == "abcx"


def test_what_was_held_when_a_job_starts_over_is_void() -> None:
    """What the new attempt tells takes its place; the echo goes on where it was."""
    fence = Restarted(worker_id="w", sampler_version=1)
    told = events(
        [
            output(1, 1, "x"),
            prompt(2, 1, "b"),
            Restart(EntryId(2, 0), fence),
            output(1, 1, "z", attempt=2),
            prompt(2, 1, "b", "c", attempt=2),
            end(3, attempt=2),
        ]
    )
    for choice, text in ((0, "abc"), (1, "abcz")):
        assert "".join(each for _, index, each, _ in told if index == choice) == text
