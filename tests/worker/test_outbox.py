"""What is coalesced on its way to a stream loses nothing."""

import random
import tracemalloc

from headwater.producer.client import new_job
from headwater.schemas import (
    Channel,
    Delta,
    DeltaPart,
    EntryId,
    PositionLogprobs,
    PromptPart,
    Restarted,
    TextSpan,
    TokenLogprob,
    encode_fields,
)
from headwater.worker.messages import Claim
from headwater.worker.outbox import Entry, Outbox

JOB = new_job("m", [1], max_tokens=1)


def _outbox() -> Outbox:
    return Outbox.of(Claim(job=JOB, queue_name="q", execution_id="e", attempt=3))


def _part(start: int, text_start: int, text: str, *, choice: int = 0) -> DeltaPart:
    span = TextSpan(text_start=text_start, text=text)
    return DeltaPart(choice=choice, start=start, token_ids=tuple(map(ord, text)), text=(span,))


def _next(outbox: Outbox) -> Entry | None:
    return outbox.next_entry("w", 1)


def test_coalesced_deltas_hold_every_token_of_every_choice_in_order() -> None:
    dice = random.Random(3)
    outbox = _outbox()
    given = {0: "", 1: "", 2: ""}
    got = {0: "", 1: "", 2: ""}
    seqs: list[int] = []
    for _ in range(2000):
        choice, text = dice.randrange(3), "abc"[: dice.randrange(1, 4)]
        start = len(given[choice])
        outbox.pending.add([_part(start, start, text, choice=choice)])
        given[choice] += text
        if dice.random() < 0.2:
            entry = _next(outbox)
            assert entry is not None
            assert entry == _next(outbox)  # until it is acknowledged
            outbox.acknowledge()
            seqs.append(entry.id.seq)
            assert isinstance(entry.event, Delta)
            for part in entry.event.parts:
                assert part.start == part.text[0].text_start == len(got[part.choice])
                assert "".join(map(chr, part.token_ids)) == part.text[0].text
                got[part.choice] += part.text[0].text
    for part in outbox.pending.merged():
        got[part.choice] += part.text[0].text

    assert got == given
    assert seqs == list(range(1, len(seqs) + 1))


def test_coalesced_deltas_keep_channels_and_tool_calls_apart() -> None:
    def call(index: int, text_start: int, text: str, name: str | None = None) -> TextSpan:
        return TextSpan(
            channel=Channel.TOOL_CALL, index=index, text_start=text_start, text=text, name=name
        )

    thought = TextSpan(channel=Channel.REASONING, text_start=0, text="hm")
    spans = [thought, call(0, 0, "{", "f"), call(0, 1, "}"), call(1, 0, "{}", "g")]
    outbox = _outbox()
    for start, span in enumerate(spans):
        outbox.pending.add([DeltaPart(choice=0, start=start, token_ids=(start,), text=(span,))])

    event = _next(outbox).event

    assert event.parts[0].text == (thought, call(0, 0, "{}", "f"), call(1, 0, "{}", "g"))


def test_coalesced_deltas_keep_the_logprobs_of_every_token() -> None:
    outbox = _outbox()
    told = [
        PositionLogprobs(
            token_id=i, logprob=-i / 4, text="", top=(TokenLogprob(token_id=i, text="é"),)
        )
        for i in range(6)
    ]
    for start in (0, 2, 4):
        tokens = tuple(told[start : start + 2])
        part = DeltaPart(choice=0, start=start, token_ids=(start, start + 1), logprobs=tokens)
        outbox.pending.add([part])
    entry = _next(outbox)

    assert entry is not None
    assert isinstance(entry.event, Delta)
    assert entry.event.parts[0].logprobs == tuple(told)
    assert outbox.told.nbytes > 6 * 8


def test_what_was_void_is_not_told_by_a_new_beginning() -> None:
    outbox = _outbox()
    outbox.pending.add([_part(0, 0, "old")])
    outbox.void()
    outbox.pending.add([_part(0, 0, "new")])
    _next(outbox)
    outbox.acknowledge()
    _next(outbox)

    outbox.begin_anew(4)
    events = []
    while (entry := _next(outbox)) is not None:
        events.append(entry)
        outbox.acknowledge()

    assert [entry.id for entry in events] == [EntryId(4, 1), EntryId(4, 2)]
    assert isinstance(events[0].event, Restarted)
    assert events[1].event == Delta(parts=(_part(0, 0, "new"),))


def _bytes_per_token(outbox: Outbox, num_tokens: int, *, is_sent: bool) -> float:
    tracemalloc.start()
    for index in range(num_tokens):
        outbox.pending.add([_part(index, index, "a")])
        if is_sent:
            _next(outbox)
            outbox.acknowledge()
    num_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return num_bytes / num_tokens


def test_a_job_that_runs_for_a_day_takes_little_more_memory_than_its_tokens_and_text() -> None:
    # An object for every entry would take 1,800.
    assert _bytes_per_token(_outbox(), 20_000, is_sent=True) < 100


def test_what_waits_for_the_server_takes_about_the_memory_that_is_counted() -> None:
    outbox = _outbox()
    assert _bytes_per_token(outbox, 20_000, is_sent=False) < 4 * outbox.pending.nbytes / 20_000


def _prompt_part(start: int, count: int, top: int = 0) -> DeltaPart:
    def of(token: int) -> TokenLogprob:
        return TokenLogprob(token_id=token, logprob=-1.5, text=str(token))

    positions = tuple(
        PositionLogprobs(**dict(of(start + place)), top=tuple(map(of, range(top))))
        for place in range(count)
    )
    prompt = PromptPart(start=start, logprobs=positions)
    return DeltaPart(choice=0, start=0, token_ids=(), prompt=prompt)


def test_a_long_prompt_goes_out_in_entries_of_a_bounded_size_before_the_text() -> None:
    """However far the server falls behind, no entry holds more than its share of a prompt."""
    outbox = _outbox()
    outbox.pending.add([_prompt_part(1, 700, top=20), _prompt_part(701, 800, top=20)])
    outbox.pending.add([_part(0, 0, "ab")])
    entries = []
    while (entry := _next(outbox)) is not None:
        entries.append(entry)
        outbox.acknowledge()

    assert len(entries) > 3
    assert max(len(encode_fields(entry.event)["data"]) for entry in entries) < 300_000
    parts = [part for entry in entries for part in entry.event.parts]
    told = [each.token_id for part in parts if part.prompt for each in part.prompt.logprobs]
    assert told == list(range(1, 1501))
    assert [part.token_ids for part in parts if part.token_ids] == [(97, 98)]
    assert parts[-1].token_ids
    assert outbox.pending.nbytes == 0

    outbox.begin_anew(4)
    again = []
    while (entry := _next(outbox)) is not None:
        again.append(entry.event)
        outbox.acknowledge()
    assert again == [entry.event for entry in entries]


def test_the_oldest_token_that_is_not_confirmed_is_known() -> None:
    """What lies in an entry on its way is older than what waits behind it."""
    outbox = _outbox()
    assert outbox.oldest_s is None

    outbox.pending.add([_part(0, 0, "a")])
    outbox.pending_since_s = 1.0
    _next(outbox)
    outbox.pending.add([_part(1, 1, "b")])
    outbox.pending_since_s = 2.0
    assert outbox.oldest_s == outbox.unacknowledged_since_s == 1.0

    outbox.acknowledge()
    assert outbox.oldest_s == 2.0


def test_what_is_told_anew_is_as_old_as_it_was() -> None:
    """A lost stream must not make the lag look small."""
    outbox = _outbox()
    outbox.pending.add([_part(0, 0, "a")])
    outbox.pending_since_s = 1.0
    _next(outbox)

    outbox.begin_anew(4)

    assert outbox.oldest_s == outbox.pending_since_s == 1.0
    assert outbox.unacknowledged_since_s is None


def test_void_text_has_no_age() -> None:
    """Nobody waits for what a restart makes void."""
    outbox = _outbox()
    outbox.pending.add([_part(0, 0, "a")])
    outbox.pending_since_s = 1.0

    outbox.void()

    assert outbox.oldest_s is None
