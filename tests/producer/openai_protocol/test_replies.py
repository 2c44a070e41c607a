"""OpenAI's replies: where each channel's text stands in them."""

from headwater.producer.openai_protocol.replies import Reply
from headwater.producer.openai_protocol.reply_formats import ChatFormat
from headwater.producer.result import ChoiceResult
from headwater.schemas import Channel, FinishReason, TextSpan, ToolCall


def test_calls_and_reasoning_stand_in_fields_of_their_own() -> None:
    reply = Reply(ChatFormat(), "m", ["job"], 0)
    first = TextSpan(channel=Channel.TOOL_CALL, index=0, name="f", text_start=0, text='{"a"')
    more = TextSpan(channel=Channel.TOOL_CALL, index=0, text_start=4, text=": 1}")
    thought = TextSpan(channel=Channel.REASONING, text_start=0, text="Hm")

    chunks = [
        reply.chunk(0, spans, None)
        for spans in ([thought, TextSpan(text_start=0, text="So")], [first], [more])
    ]

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
