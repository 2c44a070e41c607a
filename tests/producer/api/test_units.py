"""The server's parts that decide something by themselves."""

from pathlib import Path

import pytest
from headwater.producer.api.api_keys import KeyFile, KeyFileError, new_key
from headwater.producer.api.batch_rows import RowFile
from headwater.producer.api.fields import job_fields
from headwater.producer.api.rate_limit import RateLimit
from headwater.producer.api.replies import ChatFormat, Reply
from headwater.producer.api.steady_text import SteadyText
from headwater.producer.errors import StreamDiverged
from headwater.producer.result import ChoiceResult
from headwater.schemas import Channel, FinishReason, TextSpan, ToolCall


def span(text: str, start: int = 0) -> TextSpan:
    return TextSpan(text_start=start, text=text)


def test_a_rate_lets_the_first_requests_through_at_once_and_then_one_by_one() -> None:
    limit = RateLimit()

    assert [limit.wait_s("a", 3, 100.0) for _ in range(3)] == [0, 0, 0]
    assert limit.wait_s("a", 3, 100.0) == pytest.approx(20)
    assert limit.wait_s("a", 3, 110.0) == pytest.approx(10)
    assert limit.wait_s("a", 3, 120.0) == 0
    assert limit.wait_s("a", 3, 120.0) > 0
    assert limit.wait_s("b", 3, 120.0) == 0


def test_a_quiet_caller_saves_up_no_more_than_a_minutes_worth() -> None:
    limit = RateLimit()
    limit.wait_s("a", 2, 0.0)

    assert [limit.wait_s("a", 2, 1e6) > 0 for _ in range(3)] == [False, False, True]


def test_text_that_repeats_after_a_restart_is_sent_once() -> None:
    steady = SteadyText()
    assert steady.take(0, span("Hello")) == span("Hello")

    steady.restart()

    assert steady.take(0, span("Hel")) is None
    assert steady.take(0, span("lo you", 3)) == span(" you", 5)
    assert steady.take(1, span("x")) == span("x")
    steady.restart()
    steady.take(0, span("Hello you"))
    steady.take(1, span("x"))
    steady.finish()


def test_another_text_after_a_restart_is_an_error() -> None:
    steady = SteadyText()
    steady.take(0, span("Hello"))
    steady.restart()

    with pytest.raises(StreamDiverged):
        steady.take(0, span("Help"))


def test_a_shorter_text_after_a_restart_is_an_error() -> None:
    steady = SteadyText()
    steady.take(0, span("Hello"))
    steady.restart()
    steady.take(0, span("Hell"))

    with pytest.raises(StreamDiverged):
        steady.finish()


def test_a_torn_last_row_is_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "rows"
    whole = b'{"id":"batch_x-3"}\n{"id":"batch_x-7"}\n'
    for torn in (b"", b'{"id":"batch_x-9"}', b'{"id":"bat', b"\n", b"\x00\n"):
        path.write_bytes(whole + torn)
        rows = RowFile(path)
        assert rows.lines == {3, 7}
        rows.add(9, {"id": "batch_x-9"})
        rows.close()

        assert path.read_bytes() == whole + b'{"id":"batch_x-9"}\n'


def test_calls_and_reasoning_stand_in_fields_of_their_own() -> None:
    reply = Reply(ChatFormat(), "m", ["job"], 0)
    first = TextSpan(channel=Channel.TOOL_CALL, index=0, name="f", text_start=0, text='{"a"')
    more = TextSpan(channel=Channel.TOOL_CALL, index=0, text_start=4, text=": 1}")
    thought = TextSpan(channel=Channel.REASONING, text_start=0, text="Hm")

    chunks = [reply.chunk(0, spans, None) for spans in ([thought, span("So")], [first], [more])]

    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas[0] == {"role": "assistant", "content": "So", "reasoning_content": "Hm"}
    (begun,) = deltas[1]["tool_calls"]
    assert begun["function"] == {"name": "f", "arguments": '{"a"'}
    assert begun["id"] == "call_job_0_0"
    assert deltas[2]["tool_calls"] == [{"index": 0, "function": {"arguments": ": 1}"}}]
    call = ToolCall(index=0, name="f", arguments='{"a": 1}')
    choice = ChoiceResult((1,), "", FinishReason.TOOL_CALLS, "Hm", (call,))
    message = ChatFormat().whole(choice, "call_job_0")["message"]
    assert message["content"] is None
    assert message["reasoning_content"] == "Hm"
    assert message["tool_calls"][0]["id"] == begun["id"]
    assert message["tool_calls"][0]["function"] == {"name": "f", "arguments": '{"a": 1}'}


def test_a_key_file_with_a_bad_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text(new_key("a")[1] + '\n{"name": "b"}\n')

    with pytest.raises(KeyFileError, match=r"line 2: .*sha256"):
        KeyFile(path)
    with pytest.raises(KeyFileError, match="can't read"):
        KeyFile(tmp_path / "none")


def test_openais_response_formats_and_logprobs_become_the_jobs_own() -> None:
    schema = {"type": "object"}
    wrapped = {
        "type": "json_schema",
        "json_schema": {"name": "x", "strict": True, "schema": schema},
    }
    regex = {"type": "regex", "regex": "a+"}

    formats = [
        job_fields({"response_format": given}).get("response_format")
        for given in ({"type": "text"}, {"type": "json_object"}, wrapped, regex)
    ]
    logprobs = [
        job_fields(given).get("logprobs")
        for given in (
            {"logprobs": False, "top_logprobs": 0},
            {"logprobs": True},
            {"logprobs": True, "top_logprobs": 3},
            {"logprobs": 5},
            {"logprobs": 0},
        )
    ]

    own = {"type": "json_schema", "json_schema": schema}
    assert formats == [None, {"type": "json_object"}, own, regex]
    assert logprobs == [None, 0, 3, 5, 0]
