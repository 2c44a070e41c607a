import pytest
from headwater.schemas import (
    Cancelled,
    ChoiceEnd,
    Delta,
    DeltaPart,
    EntryId,
    Event,
    Expired,
    Failed,
    Finished,
    FinishReason,
    PositionLogprobs,
    Released,
    Restarted,
    Resumed,
    SchemaError,
    Started,
    TextSpan,
    Timings,
    TokenLogprob,
    Usage,
    decode_entry,
    encode_fields,
)
from pydantic import ValidationError

LOGPROBS = PositionLogprobs(
    token_id=7,
    logprob=-0.5,
    text="\ufffd",
    bytes="8J8=",
    top=(TokenLogprob(token_id=9, text="a"), TokenLogprob(token_id=7, logprob=-0.5, text="b")),
)

EVENTS: list[Event] = [
    Started(worker_id="w", sampler_version=1, metadata={"a": [1]}),
    Resumed(worker_id="w", sampler_version=1),
    Restarted(worker_id="w", sampler_version=1),
    Released(reason="drain"),
    Delta(
        parts=(
            DeltaPart(
                choice=0, start=3, token_ids=(7, 8), text=(TextSpan(text_start=2, text="é"),)
            ),
        )
    ),
    Delta(parts=(DeltaPart(choice=0, start=0, token_ids=(7,), logprobs=(LOGPROBS,)),)),
    Finished(
        choices=(ChoiceEnd(choice=0, finish_reason=FinishReason.STOP, matched_stop=5),),
        usage=Usage(prompt_tokens=1, completion_tokens=2),
        timings=Timings(total_ms=1.5),
    ),
    Failed(code="engine_error", message="no", retryable=True),
    Cancelled(metadata={"x": 1}),
    Expired(),
]


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: event.type)
def test_every_event_survives_its_stream_form(event: Event) -> None:
    fields = {key.encode(): value for key, value in encode_fields(event).items()}

    entry = decode_entry(b"2-5", fields)

    assert entry.event == event
    assert entry.id == EntryId(2, 5)


def test_only_ends_carry_the_end_field() -> None:
    ends = {event.type for event in EVENTS if "end" in encode_fields(event)}

    assert ends == {"finished", "failed", "cancelled", "expired"}


@pytest.mark.parametrize("text", ["", "1", "1-", "-1", "1-x", "1-2-3", "-1-2", "١-٢", "1.0-2"])
def test_a_bad_entry_id_is_refused(text: str) -> None:
    with pytest.raises(SchemaError, match="entry id"):
        EntryId.parse(text)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {b"type": b"delta"},
        {b"type": b"delta", b"data": b"not json"},
        {b"type": b"delta", b"data": b"[1]"},
        {b"type": b"nonsense", b"data": b"{}"},
        {b"type": b"delta", b"data": b'{"parts":[],"extra":1}'},
    ],
)
def test_an_entry_that_is_not_an_event_is_refused(fields: dict[bytes, bytes]) -> None:
    with pytest.raises(SchemaError):
        decode_entry(b"1-1", fields)


def test_logprobs_of_other_tokens_are_refused() -> None:
    with pytest.raises(ValidationError, match="one entry for each of token_ids"):
        DeltaPart(choice=0, start=0, token_ids=(7, 8), logprobs=(LOGPROBS,))
