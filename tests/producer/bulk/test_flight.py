"""Flight against a real server, with a test in the worker's place."""

from collections.abc import Callable, Iterator
from pathlib import Path

import orjson
import pytest
from headwater.producer.bulk import flight as flights
from headwater.producer.bulk.flight import Flight, RowOutcome
from headwater.producer.bulk.lines import Line
from headwater.producer.bulk.rows import ReadyRow, RowParser
from headwater.producer.client import Producer, SubmitSettings
from headwater.producer.client_queue import job_key
from headwater.producer.errors import ServerUnavailable
from headwater.producer.soak.fleet import SoakServer
from headwater.schemas import (
    Cancelled,
    ChoiceEnd,
    Event,
    Failed,
    Finished,
    FinishReason,
    ModelCard,
    Started,
    Timings,
    Usage,
    encode_fields,
    keys,
)
from redis import Redis

from tests.producer.conftest import SetStatus, WriteEntry

MakeFlight = Callable[..., Flight]


@pytest.fixture
def make_flight(
    redis_url: str, redis: Redis, card: ModelCard, monkeypatch: pytest.MonkeyPatch
) -> Iterator[MakeFlight]:
    """Make flights of the run `run`; each is a process's."""
    monkeypatch.setattr(flights, "_BLOCK_MS", 20)
    monkeypatch.setattr(flights, "_PAUSE_S", 0.01)
    made = []

    def make(*, size: int = 8, max_queue_depth: int | None = None) -> Flight:
        producer = Producer(redis_url, SubmitSettings(max_queue_depth, check_model=False))
        flight = Flight(producer, card, "run", size=size)
        made.append((producer, flight))
        return flight

    yield make
    for producer, flight in made:
        flight.close()
        producer.close()


@pytest.fixture
def rows(parser: RowParser) -> list[ReadyRow]:
    """Rows 1 to 4; the last one has two prompts."""
    prompts: list[object] = ["a", "b", "c", ["d", "e"]]
    parsed = [
        parser.parse(Line(number, orjson.dumps({"prompt": prompt})))
        for number, prompt in enumerate(prompts, 1)
    ]
    return [row for row in parsed if isinstance(row, ReadyRow)]


@pytest.fixture
def end(redis: Redis, write: WriteEntry, set_status: SetStatus) -> Callable[..., None]:
    """Be the worker that ends a job: `end("run-1")`."""

    def end(job_id: str, event: Event | None = None, status: str = "finished") -> None:
        write(job_id, "1-0", Started(worker_id="w", sampler_version=1))
        write(job_id, "1-1", event or finished(job_id))
        set_status(job_id, status)

    return end


def write_end(redis: Redis, job_id: str) -> None:
    """End a job on another server than the tests' own."""
    events = (Started(worker_id="w", sampler_version=1), finished(job_id))
    for number, event in enumerate(events):
        redis.xadd(keys.stream_key(job_id), encode_fields(event), id=f"1-{number}")


def finished(text: str) -> Finished:
    choice = ChoiceEnd(choice=0, finish_reason=FinishReason.LENGTH, text=text)
    usage = Usage(prompt_tokens=1, completion_tokens=4)
    return Finished(choices=(choice,), usage=usage, timings=Timings(total_ms=1))


def texts(outcome: RowOutcome) -> list[str]:
    return [result.choices[0].text for result in outcome.results]


def collect(flight: Flight, count: int) -> list[RowOutcome]:
    """Collect until *count* rows are done."""
    found: list[RowOutcome] = []
    while len(found) < count:
        found += flight.collect()
    return sorted(found, key=lambda outcome: outcome.row.line)


def test_rows_are_done_when_all_their_jobs_are(
    make_flight: MakeFlight, rows: list[ReadyRow], end: Callable[..., None]
) -> None:
    flight = make_flight()
    flight.submit(rows)
    for job_id in ("run-1", "run-3", "run-4"):
        end(job_id)

    first = collect(flight, 2)
    end("run-4-1")
    end("run-2")
    others = collect(flight, 2)

    assert [texts(outcome) for outcome in first] == [["run-1"], ["run-3"]]
    assert [texts(outcome) for outcome in others] == [["run-2"], ["run-4", "run-4-1"]]
    assert flight.is_empty


def test_a_second_process_finds_the_jobs_of_the_first(
    make_flight: MakeFlight, redis: Redis, rows: list[ReadyRow], end: Callable[..., None]
) -> None:
    make_flight().submit(rows[:2])
    end("run-1")

    flight = make_flight()
    flight.submit(rows[:3])
    end("run-2")
    end("run-3")
    found = collect(flight, 3)

    assert [outcome.job_ids for outcome in found] == [("run-1",), ("run-2",), ("run-3",)]
    assert redis.llen("rq:queue:tiny.low.default") == 3


def test_only_so_many_jobs_are_outstanding(
    make_flight: MakeFlight, rows: list[ReadyRow], end: Callable[..., None]
) -> None:
    flight = make_flight(size=2)
    flight.submit(rows[:2])
    assert flight.room == 0

    end("run-1")
    collect(flight, 1)

    assert flight.room == 1


def test_a_full_queue_is_waited_for(
    make_flight: MakeFlight, redis: Redis, rows: list[ReadyRow], end: Callable[..., None]
) -> None:
    redis.rpush("rq:queue:tiny.low.default", "another", "and another")
    flight = make_flight(max_queue_depth=3)
    flight.submit(rows[:2])
    assert flight.room == 0
    assert flight.collect() == []

    redis.ltrim("rq:queue:tiny.low.default", 2, -1)
    flight.collect()
    end("run-1")
    end("run-2")

    assert len(collect(flight, 2)) == 2


def test_a_failure_that_may_pass_is_tried_again_but_not_for_ever(
    make_flight: MakeFlight, rows: list[ReadyRow], end: Callable[..., None]
) -> None:
    failure = Failed(code="engine_error", message="no luck", retryable=True)
    flight = make_flight()
    flight.submit(rows[:1])

    for job_id in ("run-1", "run-1-r1"):
        end(job_id, failure, "failed")
        assert flight.collect() == []
        flight.collect()
    end("run-1-r2", failure, "failed")
    (outcome,) = collect(flight, 1)

    assert outcome.job_ids == ("run-1-r2",)
    assert outcome.results[0].end == failure


def test_a_failure_of_the_rows_own_is_an_outcome_at_once(
    make_flight: MakeFlight, rows: list[ReadyRow], end: Callable[..., None]
) -> None:
    flight = make_flight()
    flight.submit(rows[:1])
    end("run-1", Failed(code="malformed_job", message="bad"), "failed")

    (outcome,) = collect(flight, 1)

    assert outcome.results[0].end == Failed(code="malformed_job", message="bad")


def test_what_an_interrupted_run_cancelled_is_run_by_the_next_one(
    make_flight: MakeFlight, redis: Redis, rows: list[ReadyRow], end: Callable[..., None]
) -> None:
    first = make_flight()
    first.submit(rows[:2])
    end("run-2", Started(worker_id="w", sampler_version=1), "started")
    first.cancel_queued()
    assert not first.is_empty

    second = make_flight()
    second.submit(rows[:1])
    assert second.collect() == []
    second.collect()
    end("run-1-r1")

    assert [outcome.job_ids for outcome in collect(second, 1)] == [("run-1-r1",)]


def test_a_job_that_somebody_cancels_is_an_outcome(
    make_flight: MakeFlight, rows: list[ReadyRow], end: Callable[..., None]
) -> None:
    flight = make_flight()
    flight.submit(rows[:1])
    end("run-1", Cancelled(), "canceled")

    (outcome,) = collect(flight, 1)

    assert isinstance(outcome.results[0].end, Cancelled)


def test_jobs_that_the_server_forgot_are_submitted_again(
    make_flight: MakeFlight,
    redis: Redis,
    rows: list[ReadyRow],
    end: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(flights, "_CHECK_EVERY_S", 0.0)
    flight = make_flight()
    flight.submit(rows[:2])
    redis.flushall()

    flight.collect()
    flight.collect()
    end("run-1-r1")
    end("run-2-r1")

    found = collect(flight, 2)
    assert [outcome.job_ids for outcome in found] == [("run-1-r1",), ("run-2-r1",)]


def test_a_job_whose_stream_has_expired_is_run_again(
    make_flight: MakeFlight,
    redis: Redis,
    rows: list[ReadyRow],
    end: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(flights, "_CHECK_EVERY_S", 0.0)
    make_flight().submit(rows[:1])
    end("run-1")
    redis.delete(keys.stream_key("run-1"))

    flight = make_flight()
    flight.submit(rows[:1])
    flight.collect()
    flight.collect()
    end("run-1-r1")

    assert [outcome.job_ids for outcome in collect(flight, 1)] == [("run-1-r1",)]


def test_a_job_that_is_lost_again_and_again_is_an_error(
    make_flight: MakeFlight,
    redis: Redis,
    rows: list[ReadyRow],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(flights, "_CHECK_EVERY_S", 0.0)
    flight = make_flight()
    flight.submit(rows[:1])
    outcomes: list[RowOutcome] = []
    for _ in range(flights.MAX_TRIES):
        redis.flushall()
        outcomes += flight.collect()
        outcomes += flight.collect()

    assert "again and again" in str(outcomes[0].error)
    assert flight.is_empty


def test_a_row_that_the_client_refuses_harms_no_other(
    make_flight: MakeFlight, rows: list[ReadyRow], end: Callable[..., None]
) -> None:
    foreign = rows[1].jobs[0].model_copy(update={"tokenizer_fingerprint": "another"})
    flight = make_flight()
    flight.submit([rows[0], rows[1]._replace(jobs=(foreign,)), rows[2]])
    end("run-1")
    end("run-3")

    found = collect(flight, 3)

    assert "another tokenizer" in str(found[1].error)
    assert [len(outcome.results) for outcome in found] == [1, 0, 1]


def test_a_server_that_restarts_is_waited_for(
    tmp_path: Path, card: ModelCard, rows: list[ReadyRow]
) -> None:
    settings = SubmitSettings(check_model=False)
    with (
        SoakServer(tmp_path) as server,
        Redis.from_url(server.url) as redis,
        Producer(server.url, settings) as producer,
    ):
        flight = Flight(producer, card, "run", size=8)
        flight.submit(rows[:2])
        # What it has confirmed less than a second ago may be lost with it.
        redis.execute_command("WAITAOF", 1, 0, 0)
        server.restart()
        write_end(redis, "run-1")
        write_end(redis, "run-2")
        found = collect(flight, 2)
        flight.close()

    assert [outcome.job_ids for outcome in found] == [("run-1",), ("run-2",)]


def test_a_server_that_takes_nothing_is_waited_for_but_not_for_ever(
    make_flight: MakeFlight,
    redis: Redis,
    rows: list[ReadyRow],
    end: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    flight = make_flight()
    redis.config_set("maxmemory", 1)
    try:
        flight.submit(rows[:1])
        assert flight.collect() == []
        monkeypatch.setattr(flights, "_OUTAGE_S", 0.0)
        with pytest.raises(ServerUnavailable, match="maxmemory"):
            flight.collect()
    finally:
        redis.config_set("maxmemory", 0)
    flight.collect()
    end("run-1")

    assert len(collect(flight, 1)) == 1


def test_what_is_forgotten_leaves_nothing_on_the_server(
    make_flight: MakeFlight, redis: Redis, rows: list[ReadyRow], end: Callable[..., None]
) -> None:
    flight = make_flight()
    flight.submit(rows[:1])
    end("run-1")
    (outcome,) = collect(flight, 1)

    flight.forget(outcome.jobs)

    assert not redis.exists(job_key("run-1"), keys.stream_key("run-1"), keys.attempt_key("run-1"))
