"""/v1/jobs: token ids in, events out, and no event twice or never for a client that returns."""

import json
from typing import Any

import httpx2
import pytest
from headwater.producer.client import Producer
from headwater.producer.result import collect
from headwater.schemas import Cancelled, Finished

from .conftest import ALIAS, Event, parse_events

JOB: dict[str, Any] = {
    "model": ALIAS,
    "prompt_token_ids": [40, 41, 42],
    "max_tokens": 20,
    "ignore_eos": True,
    "sampling": {"temperature": 1.0, "seed": 3, "n": 3},
}


def submit(http: httpx2.Client, **fields: Any) -> str:
    answer = http.post("/v1/jobs", json={**JOB, **fields})
    assert answer.status_code == 202, answer.text
    assert answer.headers["X-Headwater-Job"] == answer.json()["id"]
    return str(answer.json()["id"])


def events_of(http: httpx2.Client, job_id: str, **headers: str) -> list[Event]:
    with http.stream("GET", f"/v1/jobs/{job_id}/events", headers=headers) as answer:
        assert answer.status_code == 200
        assert answer.headers["Content-Type"].startswith("text/event-stream")
        return list(parse_events(answer.iter_lines()))


def test_events_hold_every_token_and_end_with_the_jobs_end(
    http: httpx2.Client, producer: Producer
) -> None:
    job_id = submit(http)
    events = events_of(http, job_id)

    tokens: dict[int, list[int]] = {0: [], 1: [], 2: []}
    for event in events:
        for part in json.loads(event.data).get("parts", ()):
            assert part["start"] == len(tokens[part["choice"]])
            tokens[part["choice"]] += part["token_ids"]
    result = collect(producer.tail(job_id))
    assert tokens == {number: list(choice.token_ids) for number, choice in result.choices.items()}
    assert events[0].name == "started"
    assert events[-1].name == "finished"
    assert json.loads(events[-1].data)["usage"]["completion_tokens"] == 60


def test_only_the_last_event_of_an_entry_carries_its_id(http: httpx2.Client) -> None:
    events = events_of(http, submit(http))

    ids = [event.id for event in events if event.id is not None]
    assert len(ids) < len(events)  # three choices share an entry
    assert ids == [f"1-{number}" for number in range(len(ids))]


def test_last_event_id_resumes_after_that_entry_exactly(http: httpx2.Client) -> None:
    job_id = submit(http)
    events = events_of(http, job_id)

    for position, event in enumerate(events[:-1]):
        if event.id is not None:
            again = events_of(http, job_id, **{"Last-Event-ID": event.id})
            assert again == events[position + 1 :]


def test_the_query_says_where_to_begin_until_the_browser_knows_better(
    http: httpx2.Client,
) -> None:
    job_id = submit(http)
    ids = [event.id for event in events_of(http, job_id) if event.id is not None]
    path = f"/v1/jobs/{job_id}/events?after={ids[0]}"

    with http.stream("GET", path) as answer:
        first = next(parse_events(answer.iter_lines()))
    with http.stream("GET", path, headers={"Last-Event-ID": ids[-2]}) as answer:
        last = [event.id for event in parse_events(answer.iter_lines())]

    assert first != events_of(http, job_id)[0]
    assert last == [ids[-1]]


def test_a_client_that_saw_the_end_is_told_not_to_come_back(http: httpx2.Client) -> None:
    job_id = submit(http)
    end_id = events_of(http, job_id)[-1].id

    answer = http.get(f"/v1/jobs/{job_id}/events", headers={"Last-Event-ID": str(end_id)})

    assert answer.status_code == 204


@pytest.mark.parametrize("last_id", ["nonsense", "1-", "-1", "1-2-3", "１-２"])
def test_a_last_event_id_that_is_none_is_refused(http: httpx2.Client, last_id: str) -> None:
    job_id = submit(http)

    answer = http.get(f"/v1/jobs/{job_id}/events", params={"after": last_id})

    assert answer.status_code == 400
    assert "<attempt>-<seq>" in answer.json()["error"]["message"]


def test_an_entry_that_never_was_is_an_error_event(http: httpx2.Client) -> None:
    job_id = submit(http)
    events_of(http, job_id)

    (event,) = events_of(http, job_id, **{"Last-Event-ID": "1-4000"})

    assert event.name == "error"
    assert "no entry 1-4000" in event.data


def test_a_job_says_where_it_stands_and_how_it_ended(http: httpx2.Client, idle: str) -> None:
    waiting = submit(http, model=idle)
    done = submit(http, stream="final", metadata={"mine": 1})
    events_of(http, done)

    assert http.get(f"/v1/jobs/{waiting}").json()["status"] == "queued"
    job = http.get(f"/v1/jobs/{done}").json()
    assert job["status"] == "finished"
    assert job["model"] == ALIAS
    assert job["end"]["metadata"] == {"mine": 1}
    assert len(job["end"]["choices"]) == 3
    assert job["end"]["choices"][0]["text"]


def test_a_queued_job_is_cancelled_at_once_and_again(http: httpx2.Client, idle: str) -> None:
    job_id = submit(http, model=idle)

    outcomes = [http.post(f"/v1/jobs/{job_id}/cancel").json()["outcome"] for _ in range(2)]

    assert outcomes == ["cancelled", "already_ended"]
    assert http.get(f"/v1/jobs/{job_id}").json()["status"] == "cancelled"
    assert events_of(http, job_id)[-1].name == "cancelled"


def test_a_running_job_is_cancelled(http: httpx2.Client, producer: Producer) -> None:
    job_id = submit(http, max_tokens=4000, sampling={})
    with http.stream("GET", f"/v1/jobs/{job_id}/events") as answer:
        events = parse_events(answer.iter_lines())
        while next(events).name != "delta":
            pass
        assert http.post(f"/v1/jobs/{job_id}/cancel").json()["outcome"] == "requested"

    assert isinstance(collect(producer.tail(job_id)).end, Cancelled)


@pytest.mark.parametrize(
    ("method", "path"),
    [("GET", ""), ("POST", "/cancel"), ("GET", "/events")],
)
def test_an_unknown_job_is_not_found(http: httpx2.Client, method: str, path: str) -> None:
    answer = http.request(method, f"/v1/jobs/nobodys{path}")

    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "job_not_found"


def test_an_idempotent_submit_is_one_job(http: httpx2.Client, producer: Producer) -> None:
    headers = {"Idempotency-Key": "one"}
    first, second = (
        http.post("/v1/jobs", json=JOB, headers=headers).json()["id"] for _ in range(2)
    )
    other = http.post("/v1/jobs", json={**JOB, "max_tokens": 3}, headers=headers)

    assert first == second
    assert isinstance(producer.result(first).end, Finished)
    assert other.status_code == 409
    assert other.json()["error"]["code"] == "idempotency_conflict"


def test_a_job_id_of_ones_own_is_taken_once(http: httpx2.Client) -> None:
    assert submit(http, job_id="my-own") == "my-own"

    again = http.post("/v1/jobs", json={**JOB, "job_id": "my-own"})

    assert again.status_code == 409


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"sampling": {"top_p": 0}}, "top_p"),
        ({"prompt_token_ids": []}, "prompt_token_ids"),
        ({"prompt_token_ids": [1, -1]}, "prompt_token_ids.1"),
        ({"max_tokens": None}, "max_tokens"),
        ({"job_id": "a:b"}, "job_id"),
    ],
)
def test_a_job_that_is_none_is_refused_by_name(
    http: httpx2.Client, fields: dict[str, Any], param: str
) -> None:
    answer = http.post("/v1/jobs", json={**JOB, **fields})

    assert answer.status_code == 422
    assert answer.json()["error"]["param"] == param


def test_an_unknown_field_of_a_job_is_refused(http: httpx2.Client) -> None:
    answer = http.post("/v1/jobs", json={**JOB, "temperature": 1})

    assert answer.status_code == 422
    assert "unknown field 'temperature'" in answer.json()["error"]["message"]
