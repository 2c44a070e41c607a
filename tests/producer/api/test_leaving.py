"""Clients that go away, servers that stop, and streams that stay silent."""

import json
from typing import Any

import httpx2
import pytest
from headwater.producer.client import Producer, new_job
from headwater.producer.result import collect
from headwater.schemas import Cancelled, Finished

from .conftest import ALIAS, StartApi, parse_events

LONG: dict[str, Any] = {
    "model": ALIAS,
    "prompt": "Once",
    "max_tokens": 4000,
    "ignore_eos": True,
    "temperature": 0,
}


def leave_after_first_text(http: httpx2.Client, path: str, **request: Any) -> str:
    """Read a stream up to its first text, go away, and return the job's id."""
    method = "POST" if request else "GET"
    with http.stream(method, path, **request) as answer:
        for event in parse_events(answer.iter_lines()):
            if '"text"' in event.data:
                return str(answer.headers["X-Headwater-Job"])
    raise AssertionError("no text came")


def test_a_client_that_leaves_its_stream_cancels_the_job(
    http: httpx2.Client, producer: Producer
) -> None:
    job_id = leave_after_first_text(http, "/v1/completions", json={**LONG, "stream": True})

    assert isinstance(collect(producer.tail(job_id)).end, Cancelled)


def test_a_client_may_ask_for_its_job_to_go_on(http: httpx2.Client, producer: Producer) -> None:
    body = {**LONG, "max_tokens": 200, "stream": True, "cancel_on_disconnect": False}
    job_id = leave_after_first_text(http, "/v1/completions", json=body)

    assert isinstance(collect(producer.tail(job_id)).end, Finished)


def test_a_reader_of_events_leaves_without_a_trace(http: httpx2.Client, producer: Producer) -> None:
    job_id = producer.submit(new_job(ALIAS, [40], max_tokens=200, ignore_eos=True))

    leave_after_first_text(http, f"/v1/jobs/{job_id}/events")

    assert isinstance(collect(producer.tail(job_id)).end, Finished)


def test_a_reader_of_events_may_take_the_job_along(http: httpx2.Client, producer: Producer) -> None:
    job_id = producer.submit(new_job(ALIAS, [40], max_tokens=4000, ignore_eos=True))

    leave_after_first_text(http, f"/v1/jobs/{job_id}/events?cancel_on_disconnect=true")

    assert isinstance(collect(producer.tail(job_id)).end, Cancelled)


def give_up_waiting(http: httpx2.Client, model: str, **fields: Any) -> None:
    """Ask for a whole reply from a model that nobody serves, and go away."""
    with pytest.raises(httpx2.ReadTimeout):
        http.post("/v1/completions", json={**LONG, "model": model, **fields}, timeout=0.5)


def test_a_client_that_gives_up_a_whole_reply_leaves_the_job_waiting(
    http: httpx2.Client, producer: Producer, idle: str
) -> None:
    give_up_waiting(http, idle)

    (job_id,) = producer.redis.lrange(f"rq:queue:{idle}.normal.default", 0, -1)
    assert http.get(f"/v1/jobs/{job_id.decode()}").json()["status"] == "queued"


def test_a_client_that_gives_up_a_whole_reply_may_take_the_job_along(
    http: httpx2.Client, producer: Producer, idle: str
) -> None:
    give_up_waiting(http, idle, cancel_on_disconnect=True, priority="low")

    registry = f"rq:canceled:{idle}.low.default"
    while not (found := producer.redis.zrange(registry, 0, -1)):
        pass  # nobody would tell: the client is gone
    assert isinstance(collect(producer.tail(found[0].decode())).end, Cancelled)


def test_a_silent_stream_is_kept_open_with_comments(start_api: StartApi, idle: str) -> None:
    api = start_api(keepalive_s=0.05)
    body = {**LONG, "model": idle, "stream": True}
    with (
        httpx2.Client(base_url=api.url) as client,
        client.stream("POST", "/v1/completions", json=body) as answer,
    ):
        lines = answer.iter_lines()
        comments = [next(lines) for _ in range(6)]

    assert comments == [": keep-alive", ""] * 3


def test_a_server_that_stops_ends_its_streams_and_leaves_their_jobs_running(
    start_api: StartApi, worker: object, producer: Producer
) -> None:
    api = start_api()
    body = {**LONG, "max_tokens": 400, "stream": True}
    with (
        httpx2.Client(base_url=api.url) as client,
        client.stream("POST", "/v1/completions", json=body) as answer,
    ):
        job_id = answer.headers["X-Headwater-Job"]
        events = parse_events(answer.iter_lines())
        texts = [json.loads(next(events).data)["choices"][0]["text"]]
        api.stop()
        rest = [json.loads(event.data) for event in events]

    *more, last = rest
    texts += [event["choices"][0]["text"] for event in more]
    assert last["error"]["code"] == "server_stopping"
    result = collect(producer.tail(job_id))
    assert isinstance(result.end, Finished)
    assert result.choices[0].text.startswith("".join(texts))
