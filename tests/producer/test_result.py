"""A job's items put together, channel by channel."""

from headwater.producer.result import collect
from headwater.producer.stream_reader import StreamReader
from headwater.schemas import (
    Channel,
    ChoiceEnd,
    Delta,
    DeltaPart,
    EntryId,
    Event,
    Finished,
    FinishReason,
    Resumed,
    Started,
    StreamEntry,
    TextSpan,
    Timings,
    ToolCall,
    Usage,
)

STARTED = Started(worker_id="w", sampler_version=1)


def call(index: int, text_start: int, text: str, name: str | None = None) -> TextSpan:
    return TextSpan(
        channel=Channel.TOOL_CALL, index=index, text_start=text_start, text=text, name=name
    )


def thought(text_start: int, text: str) -> TextSpan:
    return TextSpan(channel=Channel.REASONING, text_start=text_start, text=text)


def said(text_start: int, text: str) -> TextSpan:
    return TextSpan(text_start=text_start, text=text)


def delta(start: int, *spans: TextSpan) -> Delta:
    return Delta(parts=(DeltaPart(choice=0, start=start, token_ids=(7,), text=spans),))


def finished(**fields) -> Finished:
    end = ChoiceEnd(choice=0, finish_reason=FinishReason.TOOL_CALLS, **fields)
    usage = Usage(prompt_tokens=1, completion_tokens=2)
    return Finished(choices=(end,), usage=usage, timings=Timings(total_ms=1.0))


def read(*entries: tuple[str, Event]):
    reader = StreamReader()
    items = []
    for at, event in entries:
        items += reader.feed(StreamEntry(EntryId.parse(at), event))
    return collect(items).choices[0]


def test_channels_are_told_apart_and_every_call_has_its_own_arguments() -> None:
    result = read(
        ("1-0", STARTED),
        ("1-1", delta(0, thought(0, "hm"), said(0, "Let me see."))),
        ("1-2", delta(1, call(0, 0, '{"a"', "add"))),
        ("1-3", delta(2, call(0, 4, ": 1}"), call(1, 0, "{}", "stop"))),
        ("1-4", finished()),
    )

    assert (result.text, result.reasoning) == ("Let me see.", "hm")
    assert result.tool_calls == (
        ToolCall(index=0, name="add", arguments='{"a": 1}'),
        ToolCall(index=1, name="stop", arguments="{}"),
    )


def test_what_a_later_attempt_tells_again_of_a_call_is_dropped() -> None:
    result = read(
        ("1-0", STARTED),
        ("1-1", delta(0, call(0, 0, '{"a"', "add"))),
        ("2-0", Resumed(worker_id="w", sampler_version=1)),
        ("2-1", delta(0, call(0, 0, '{"a": 1}', "add"))),
        ("2-2", finished()),
    )

    assert result.tool_calls == (ToolCall(index=0, name="add", arguments='{"a": 1}'),)


def test_a_final_job_has_all_channels_in_its_end() -> None:
    tool_call = ToolCall(index=0, name="add", arguments="{}")
    result = read(
        ("1-0", STARTED), ("1-1", finished(text="", reasoning="hm", tool_calls=(tool_call,)))
    )

    assert (result.text, result.reasoning, result.tool_calls) == ("", "hm", (tool_call,))
