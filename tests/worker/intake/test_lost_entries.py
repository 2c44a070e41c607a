"""Entries that the server lost: told again, never with a gap, never twice."""

from collections.abc import Callable

import pytest
from headwater.schemas import (
    Restarted,
    Started,
    keys,
)
from headwater.worker.messages import Drop
from headwater.worker.streams import JobStreams, Tip
from redis import Redis

from .conftest import (
    FINISHED,
    Station,
    Stations,
    Submit,
    part,
    text_of,
    types_of,
    wait_for_entries,
)


def test_a_stream_that_is_lost_while_its_job_runs_is_told_anew(
    redis: Redis, station: Stations, submit: Submit
) -> None:
    job_id = submit()
    worker = station()
    worker.claim()
    worker.publisher.delta(job_id, [part(0, 1, 2)])
    wait_for_entries(redis, job_id, 2)
    redis.delete(keys.stream_key(job_id))

    worker.publisher.delta(job_id, [part(2, 3)])
    worker.publisher.end(job_id, FINISHED)
    assert worker.publisher.wait_until_closed(10)

    assert types_of(redis, job_id) == ["restarted", "delta", "finished"]
    assert text_of(redis, job_id) == "bcd"


def test_entries_that_a_fail_over_took_back_are_sent_again(
    redis: Redis, station: Stations, submit: Submit
) -> None:
    job_id = submit()
    worker = station()
    worker.claim()
    for index in range(3):
        worker.publisher.delta(job_id, [part(index, index)])
        wait_for_entries(redis, job_id, index + 2)
    with redis.pipeline() as pipeline:  # a replica that was a second behind took over
        entries = redis.xrange(keys.stream_key(job_id))
        pipeline.delete(keys.stream_key(job_id))
        for entry_id, fields in entries[:2]:
            pipeline.xadd(keys.stream_key(job_id), fields, id=entry_id)
        pipeline.execute()

    worker.publisher.delta(job_id, [part(3, 3)])
    worker.publisher.end(job_id, FINISHED)
    assert worker.publisher.wait_until_closed(10)

    assert text_of(redis, job_id) == "abcd"


def test_a_restart_voids_what_readers_have(redis: Redis, station: Stations, submit: Submit) -> None:
    job_id = submit()
    worker = station()
    worker.claim()
    worker.publisher.delta(job_id, [part(0, 1)])
    wait_for_entries(redis, job_id, 2)
    worker.publisher.restart(job_id)
    worker.publisher.delta(job_id, [part(0, 5, 6)])
    worker.publisher.end(job_id, FINISHED)
    assert worker.publisher.wait_until_closed(10)

    events = [entry.event for entry in JobStreams(redis).read(job_id)]
    assert [type(event) for event in events[:3:2]] == [Started, Restarted]
    assert types_of(redis, job_id)[2:] == ["restarted", "delta", "finished"]


def _take_back(redis: Redis, job_id: str, num_kept: int) -> None:
    """Leave the first entries only, as a replica that was behind would when it takes over."""
    stream = keys.stream_key(job_id)
    entries = redis.xrange(stream)
    with redis.pipeline() as pipeline:
        pipeline.delete(stream)
        for entry_id, fields in entries[:num_kept]:
            pipeline.xadd(stream, fields, id=entry_id)
        pipeline.execute()


@pytest.mark.parametrize("num_kept", [1, 2, 3])
def test_entries_taken_back_after_the_last_delta_are_there_before_the_end(
    redis: Redis, station: Stations, submit: Submit, num_kept: int
) -> None:
    job_id = submit()
    worker = station()
    worker.claim()
    for index in range(3):
        worker.publisher.delta(job_id, [part(index, index)])
        wait_for_entries(redis, job_id, index + 2)
    _take_back(redis, job_id, num_kept)

    worker.publisher.end(job_id, FINISHED)
    assert worker.publisher.wait_until_closed(10)

    assert types_of(redis, job_id) == ["started", "delta", "delta", "delta", "finished"]
    assert text_of(redis, job_id) == "abc"


def test_a_fence_that_was_taken_back_is_written_again_and_all_is_told(
    redis: Redis, station: Stations, submit: Submit
) -> None:
    job_id = submit()
    first = station()
    first.claim()
    first.publisher.delta(job_id, [part(0, 1)])
    first.publisher.release(job_id, "drain")
    assert first.publisher.wait_until_closed(10)
    second = station()
    assert second.claim().attempt == 2
    second.publisher.delta(job_id, [part(1, 2)])
    wait_for_entries(redis, job_id, 5)
    _take_back(redis, job_id, 3)

    second.publisher.delta(job_id, [part(2, 3)])
    second.publisher.end(job_id, FINISHED)
    assert second.publisher.wait_until_closed(10)

    assert types_of(redis, job_id)[3:] == ["resumed", "delta", "finished"]
    assert text_of(redis, job_id) == "bcd"


def test_a_lost_reply_to_a_new_beginning_does_not_cost_the_job(
    redis: Redis, station: Stations, submit: Submit
) -> None:
    job_id = submit()
    worker = station()
    claim = worker.claim()
    fence = JobStreams(redis).read(job_id)[0].event
    assert isinstance(fence, Started)
    redis.delete(keys.stream_key(job_id))
    JobStreams(redis).begin(job_id, claim.execution_id, fence, 60_000)

    worker.publisher.delta(job_id, [part(0, 1)])
    worker.publisher.end(job_id, FINISHED)
    assert worker.publisher.wait_until_closed(10)

    assert types_of(redis, job_id) == ["restarted", "delta", "finished"]
    assert worker.inbox.empty()


def _after_the_look(
    worker: Station, monkeypatch: pytest.MonkeyPatch, change: Callable[[], object]
) -> None:
    """Let *change* happen between the publisher's look at a stream and what it sends again."""
    look, changes = JobStreams.tip, [change]

    def look_then_change(streams: JobStreams, job_id: str) -> Tip | None:
        tip = look(streams, job_id)
        while changes:
            changes.pop()()
        return tip

    monkeypatch.setattr(JobStreams, "tip", look_then_change)
    worker.publisher._check_all()


def test_a_fence_that_comes_while_entries_are_sent_again_is_heeded_at_once(
    redis: Redis, station: Stations, submit: Submit, monkeypatch: pytest.MonkeyPatch
) -> None:
    job_id = submit()
    worker = station()
    worker.claim()
    worker.publisher.delta(job_id, [part(0, 1)])
    wait_for_entries(redis, job_id, 2)
    while worker.publisher.silent_claims():
        pass
    _take_back(redis, job_id, 1)
    fence = Started(worker_id="other", sampler_version=1)

    _after_the_look(
        worker,
        monkeypatch,
        lambda: JobStreams(redis).begin(job_id, "another execution", fence, 60_000),
    )

    # The job tells nothing more, and is dropped all the same.
    assert worker.inbox.get(timeout=10) == Drop(job_id)
    assert types_of(redis, job_id) == ["started", "resumed"]


def test_a_stream_that_goes_while_entries_are_sent_again_is_begun_anew_at_once(
    redis: Redis, station: Stations, submit: Submit, monkeypatch: pytest.MonkeyPatch
) -> None:
    job_id = submit()
    worker = station()
    worker.claim()
    worker.publisher.delta(job_id, [part(0, 1)])
    wait_for_entries(redis, job_id, 2)
    while worker.publisher.silent_claims():
        pass
    _take_back(redis, job_id, 1)

    _after_the_look(worker, monkeypatch, lambda: redis.delete(keys.stream_key(job_id)))

    wait_for_entries(redis, job_id, 2)
    assert types_of(redis, job_id) == ["restarted", "delta"]
    assert worker.inbox.empty()


def test_a_broken_stream_costs_its_job_and_no_other(
    redis: Redis, station: Stations, submit: Submit
) -> None:
    bad, good = submit(), submit()
    worker = station()
    worker.claim()
    worker.claim()
    redis.delete(keys.stream_key(bad))
    redis.set(keys.stream_key(bad), "none of ours")

    worker.publisher.delta(bad, [part(0, 1)])
    worker.publisher.delta(good, [part(0, 1)])
    worker.publisher.end(bad, FINISHED)
    worker.publisher.end(good, FINISHED)
    assert worker.publisher.wait_until_closed(10)

    assert text_of(redis, good) == "b"
    assert worker.inbox.get(timeout=10) == Drop(bad)


def test_more_lost_entries_than_the_worker_keeps_are_told_anew(
    redis: Redis, station: Stations, submit: Submit
) -> None:
    job_id = submit()
    worker = station()
    worker.claim()
    num_entries = 300
    for index in range(num_entries):
        worker.publisher.delta(job_id, [part(index, index)])
        wait_for_entries(redis, job_id, index + 2)
    _take_back(redis, job_id, 10)

    worker.publisher.delta(job_id, [part(num_entries, num_entries)])
    worker.publisher.end(job_id, FINISHED)
    assert worker.publisher.wait_until_closed(10)

    assert types_of(redis, job_id)[-4:] == ["delta", "resumed", "delta", "finished"]
    assert text_of(redis, job_id) == part(0, *range(num_entries + 1)).text[0].text
