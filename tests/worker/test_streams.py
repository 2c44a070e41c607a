import random
import threading

import pytest
from headwater.schemas import (
    Cancelled,
    Delta,
    DeltaPart,
    EntryId,
    Failed,
    PositionLogprobs,
    PromptPart,
    Released,
    Restarted,
    Resumed,
    Started,
    StreamEntry,
    TextSpan,
    keys,
)
from headwater.worker.streams import Appended, Begun, Ended, JobStreams, history_of
from redis import Redis

FENCE = Started(worker_id="w", sampler_version=3)
TTL_MS = 60_000


def _delta(start: int, *token_ids: int) -> Delta:
    return Delta(parts=(DeltaPart(choice=0, start=start, token_ids=token_ids),))


def _begin(streams: JobStreams, execution: str) -> Begun:
    begun = streams.begin("j", execution, FENCE, TTL_MS)
    assert isinstance(begun, Begun)
    return begun


@pytest.fixture
def streams(redis: Redis) -> JobStreams:
    return JobStreams(redis)


def _append(streams: JobStreams, attempt: int, seq: int, event: Delta | Released) -> Appended:
    return streams.append_all([("j", EntryId(attempt, seq), event)], TTL_MS)[0]


def test_a_first_attempt_starts_and_a_later_one_resumes(streams: JobStreams) -> None:
    first = _begin(streams, "a")
    second = _begin(streams, "b")

    assert (first.attempt, second.attempt) == (1, 2)
    assert [entry.event.type for entry in streams.read("j")] == ["started", "resumed"]
    assert [entry.execution_id for entry in streams.read("j")] == ["a", "b"]


def test_a_repeated_begin_returns_its_own_attempt(streams: JobStreams) -> None:
    assert _begin(streams, "a") == _begin(streams, "a")
    assert len(streams.read("j")) == 1


def test_an_attempt_on_a_lost_stream_says_restarted(streams: JobStreams, redis: Redis) -> None:
    _begin(streams, "a")
    redis.delete(keys.stream_key("j"))

    begun = _begin(streams, "b")

    assert begun.attempt == 2
    assert [entry.event.type for entry in streams.read("j")] == ["restarted"]


def test_an_attempt_number_grows_also_when_the_counter_was_lost(
    streams: JobStreams, redis: Redis
) -> None:
    for execution in "abc":
        _begin(streams, execution)
    redis.delete(keys.attempt_key("j"))

    assert _begin(streams, "d").attempt == 4
    assert _begin(streams, "e").attempt == 5


def test_begin_on_an_ended_stream_writes_nothing(streams: JobStreams) -> None:
    streams.close("j", Cancelled(), TTL_MS)

    begun = streams.begin("j", "a", FENCE, TTL_MS)

    assert isinstance(begun, Ended)
    assert begun.entry.event == Cancelled()
    assert len(streams.read("j")) == 1


def test_the_first_end_stays(streams: JobStreams) -> None:
    first = streams.close("j", Cancelled(), TTL_MS)
    second = streams.close("j", Failed(code="x", message="y"), TTL_MS)

    assert first == second


def test_every_key_has_an_expiry_and_the_counter_outlives_the_stream(
    streams: JobStreams, redis: Redis
) -> None:
    attempt = _begin(streams, "a").attempt
    _append(streams, attempt, 1, _delta(0, 1))

    assert 0 < redis.pttl(keys.stream_key("j")) <= TTL_MS
    assert TTL_MS < redis.pttl(keys.attempt_key("j")) <= 2 * TTL_MS


def test_an_entry_sent_twice_is_there_once(streams: JobStreams) -> None:
    _begin(streams, "a")

    assert _append(streams, 1, 1, _delta(0, 1)) is Appended.WRITTEN
    assert _append(streams, 1, 1, _delta(0, 1)) is Appended.WRITTEN
    assert len(streams.read("j")) == 2


def test_a_zombies_entry_is_fenced(streams: JobStreams) -> None:
    _begin(streams, "a")
    _begin(streams, "b")

    assert _append(streams, 1, 1, _delta(0, 1)) is Appended.FENCED
    assert len(streams.read("j")) == 2


def test_an_entry_below_the_last_one_of_its_attempt_is_never_taken_for_written(
    streams: JobStreams,
) -> None:
    _begin(streams, "a")
    _append(streams, 1, 1, _delta(0, 1))
    _append(streams, 1, 2, _delta(1, 2))

    assert _append(streams, 1, 1, _delta(0, 9)) is Appended.BEHIND


def test_an_entry_for_a_lost_stream_does_not_make_a_new_one(
    streams: JobStreams, redis: Redis
) -> None:
    _begin(streams, "a")
    redis.delete(keys.stream_key("j"))

    assert _append(streams, 1, 1, _delta(0, 1)) is Appended.GONE
    assert not redis.exists(keys.stream_key("j"))


def test_appending_goes_on_after_the_server_forgot_its_scripts(
    streams: JobStreams, redis: Redis
) -> None:
    _begin(streams, "a")
    redis.script_flush()

    assert _append(streams, 1, 1, _delta(0, 1)) is Appended.WRITTEN


def test_a_full_server_means_later(streams: JobStreams, redis: Redis) -> None:
    _begin(streams, "a")
    redis.config_set("maxmemory", "1")
    try:
        outcome = _append(streams, 1, 1, _delta(0, 1))
    finally:
        redis.config_set("maxmemory", "0")

    assert outcome is Appended.LATER
    assert _append(streams, 1, 1, _delta(0, 1)) is Appended.WRITTEN


def _claim_all(redis_url: str, name: str, seed: int) -> None:
    """Claim and write 60 streams; 30% of all calls are sent twice, as after a lost reply."""
    draw = random.Random(seed)
    with Redis.from_url(redis_url) as client:
        streams = JobStreams(client)
        for index in range(60):
            for _ in range(1 + (draw.random() < 0.3)):
                begun = streams.begin(f"s{index}", f"{name}{index}", FENCE, TTL_MS)
            assert isinstance(begun, Begun)
            for seq in (1, 2):
                entry = (f"s{index}", EntryId(begun.attempt, seq), _delta(seq - 1, seed))
                for _ in range(1 + (draw.random() < 0.3)):
                    streams.append_all([entry], TTL_MS)


def test_three_claimants_with_repeated_calls_never_mix_in_one_attempt(redis_url: str) -> None:
    threads = [
        threading.Thread(target=_claim_all, args=(redis_url, name, seed))
        for seed, name in enumerate("abc")
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    with Redis.from_url(redis_url) as client:
        for index in range(60):
            entries = JobStreams(client).read(f"s{index}")
            _check_attempts(entries)


def _check_attempts(entries: list[StreamEntry]) -> None:
    attempts = sorted({entry.id.attempt for entry in entries})
    assert attempts == list(range(1, len(attempts) + 1))
    for attempt in attempts:
        fence, *rest = (entry for entry in entries if entry.id.attempt == attempt)
        assert [entry.id.seq for entry in rest] == list(range(1, len(rest) + 1))
        for entry in rest:
            assert isinstance(entry.event, Delta)
            seed = entry.event.parts[0].token_ids[0]
            assert str(fence.execution_id).startswith("abc"[seed])


def test_history_holds_what_was_published_since_the_last_restart(streams: JobStreams) -> None:
    _begin(streams, "a")
    _append(streams, 1, 1, _delta(0, 1, 2))
    _begin(streams, "b")
    _append(streams, 2, 1, _delta(2, 3))
    attempt = _begin(streams, "c").attempt

    history = history_of(streams.read("j"), attempt)

    assert [part.token_ids for part in history.parts] == [(1, 2), (3,)]
    assert history.sampler_version == 3
    assert history.strikes == 0
    assert history.first_started_ms == streams.read("j")[0].at_ms


def test_strikes_are_attempts_in_a_row_without_a_token(streams: JobStreams) -> None:
    _begin(streams, "a")
    _append(streams, 1, 1, _delta(0, 1))
    _begin(streams, "b")
    _begin(streams, "c")

    assert history_of(streams.read("j"), _begin(streams, "d").attempt).strikes == 2


def test_a_hand_back_is_no_strike(streams: JobStreams) -> None:
    _begin(streams, "a")
    _append(streams, 1, 1, Released(reason="drain"))

    assert history_of(streams.read("j"), _begin(streams, "b").attempt).strikes == 0


def test_a_mid_attempt_restart_voids_what_came_before() -> None:
    streams_events = [
        (EntryId(1, 0), FENCE),
        (EntryId(1, 1), _delta(0, 1)),
        (EntryId(2, 0), Resumed(worker_id="w", sampler_version=4)),
    ]
    entries = [StreamEntry(entry_id, event) for entry_id, event in streams_events]
    entries.append(StreamEntry(EntryId(2, 1), Restarted(worker_id="w", sampler_version=4)))
    entries.append(StreamEntry(EntryId(2, 2), _delta(0, 7)))

    history = history_of(entries, 3)

    assert [part.token_ids for part in history.parts] == [(7,)]
    assert history.sampler_version == 4


def test_what_an_attempt_told_again_after_a_fail_over_counts_once(streams: JobStreams) -> None:
    _begin(streams, "a")
    _append(streams, 1, 1, _told(0, "ab"))
    _begin(streams, "a after the fail-over")
    _append(streams, 2, 1, _told(0, "abcd"))
    _append(streams, 2, 2, _told(4, "e"))

    history = history_of(streams.read("j"), _begin(streams, "b").attempt)

    assert [(part.start, part.token_ids) for part in history.parts] == [
        (0, (97, 98)),
        (2, (99, 100)),
        (4, (101,)),
    ]
    spans = [span for part in history.parts for span in part.text]
    assert [(span.text_start, span.text) for span in spans] == [(0, "ab"), (2, "cd"), (4, "e")]
    told = [each.token_id for part in history.parts for each in part.logprobs or ()]
    assert told == [97, 98, 99, 100, 101]


def test_a_prompt_that_was_told_again_counts_once(streams: JobStreams) -> None:
    """A new attempt learns of each told position once, whoever told it how often."""
    _begin(streams, "a")
    _append(streams, 1, 1, _of_prompt(1, "ab"))
    _begin(streams, "a after the fail-over")
    _append(streams, 2, 1, _of_prompt(1, "abcd"))
    _append(streams, 2, 2, _of_prompt(3, "cd"))
    _append(streams, 2, 3, _delta(0, 7))

    history = history_of(streams.read("j"), _begin(streams, "b").attempt)

    told = [(part.prompt.start, len(part.prompt.logprobs)) for part in history.parts[:-1]]
    assert told == [(1, 2), (3, 2)]
    assert history.parts[-1].prompt is None


def _of_prompt(start: int, text: str) -> Delta:
    told = tuple(PositionLogprobs(token_id=ord(c), logprob=-1.0, text=c) for c in text)
    prompt = PromptPart(start=start, logprobs=told)
    return Delta(parts=(DeltaPart(choice=0, start=0, token_ids=(), prompt=prompt),))


def _told(start: int, text: str) -> Delta:
    span = TextSpan(text_start=start, text=text)
    token_ids = tuple(map(ord, text))
    told = tuple(PositionLogprobs(token_id=i, logprob=-1.0, text=chr(i)) for i in token_ids)
    part = DeltaPart(choice=0, start=start, token_ids=token_ids, text=(span,), logprobs=told)
    return Delta(parts=(part,))
