"""API keys: who may call, what they may see, and how much."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
import structlog
from headwater.producer.api.api_keys import new_key
from headwater.producer.client import Producer
from headwater.producer.client_queue import job_key, read_payload

from .conftest import ALIAS, RunningApi, StartApi, parse_events

JOB: dict[str, Any] = {"model": ALIAS, "prompt_token_ids": [40], "max_tokens": 2}

AddKey = Callable[..., str]


@pytest.fixture
def keys_file(tmp_path: Path) -> Path:
    """A file with a comment and nobody in it."""
    path = tmp_path / "keys.jsonl"
    path.write_text("# who may call\n\n")
    return path


@pytest.fixture
def add_key(keys_file: Path) -> AddKey:
    """Add a caller, `add_key("alice", namespace="a")`, and return the key."""

    def add(name: str, **fields: Any) -> str:
        key, line = new_key(name, **fields)
        assert key not in line
        with keys_file.open("a") as file:
            file.write(line + "\n")
        return key

    return add


@pytest.fixture
def guarded(start_api: StartApi, worker: object, keys_file: Path) -> RunningApi:
    """A server that wants keys."""
    return start_api(keys_file=keys_file)


def http_of(api: RunningApi, key: str) -> httpx2.Client:
    return httpx2.Client(base_url=api.url, headers={"Authorization": f"Bearer {key}"}, timeout=60)


ROUTES = [
    ("GET", "/v1/models"),
    ("GET", "/v1/models/tiny"),
    ("GET", "/v1/status"),
    ("POST", "/v1/completions"),
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/embeddings"),
    ("POST", "/v1/jobs"),
    ("GET", "/v1/jobs/x"),
    ("POST", "/v1/jobs/x/cancel"),
    ("GET", "/v1/jobs/x/events"),
    ("POST", "/v1/files"),
    ("GET", "/v1/files"),
    ("GET", "/v1/files/x"),
    ("GET", "/v1/files/x/content"),
    ("DELETE", "/v1/files/x"),
    ("POST", "/v1/batches"),
    ("GET", "/v1/batches"),
    ("GET", "/v1/batches/x"),
    ("POST", "/v1/batches/x/cancel"),
]


def test_every_route_with_data_wants_a_key(guarded: RunningApi) -> None:
    with httpx2.Client(base_url=guarded.url) as client:
        paths = client.get("/openapi.json").json()["paths"]
        known = {path.split("/{")[0] for _, path in ROUTES}
        open_to_all = {"/healthz", "/readyz", "/metrics"}
        assert {path.split("/{")[0] for path in paths} - open_to_all <= known

        for method, path in ROUTES:
            answer = client.request(method, path)
            assert answer.status_code == 401, (method, path)
            assert answer.json()["error"]["type"] == "authentication_error"


def test_an_unknown_key_is_refused_and_a_known_one_is_not(
    guarded: RunningApi, add_key: AddKey
) -> None:
    key = add_key("alice")

    assert [model.id for model in guarded.client(key).models.list()] == [ALIAS]
    with pytest.raises(openai.AuthenticationError) as caught:
        guarded.client(key + "x").models.list()
    assert caught.value.code == "invalid_api_key"


def test_a_removed_key_stops_working_at_once(
    guarded: RunningApi, add_key: AddKey, keys_file: Path
) -> None:
    key = add_key("alice")
    guarded.client(key).models.list()

    keys_file.write_text("")

    with pytest.raises(openai.AuthenticationError):
        guarded.client(key).models.list()


def test_a_typing_error_in_the_file_locks_nobody_out(
    guarded: RunningApi, add_key: AddKey, keys_file: Path
) -> None:
    key = add_key("alice")
    guarded.client(key).models.list()

    with keys_file.open("a") as file:
        file.write('{"name": "bob"\n')

    guarded.client(key).models.list()


def test_namespaces_see_nothing_of_each_other(
    guarded: RunningApi, add_key: AddKey, producer: Producer
) -> None:
    keys = [add_key(name, namespace=name) for name in ("alice", "bob")]
    with http_of(guarded, keys[0]) as alice, http_of(guarded, keys[1]) as bob:
        job_id = alice.post("/v1/jobs", json=JOB).json()["id"]
        with alice.stream("GET", f"/v1/jobs/{job_id}/events") as answer:
            assert list(parse_events(answer.iter_lines()))[-1].name == "finished"
        file = {"file": ("a.jsonl", b"{}"), "purpose": (None, "batch")}
        file_id = alice.post("/v1/files", files=file).json()["id"]
        batch = {
            "input_file_id": file_id,
            "endpoint": "/v1/completions",
            "completion_window": "24h",
        }
        batch_id = alice.post("/v1/batches", json=batch).json()["id"]

        assert bob.post("/v1/batches", json=batch).status_code == 404
        for path in (f"jobs/{job_id}", f"files/{file_id}", f"batches/{batch_id}"):
            assert alice.get(f"/v1/{path}").status_code == 200
            assert bob.get(f"/v1/{path}").status_code == 404
        for path in (f"/v1/jobs/{job_id}/cancel", f"/v1/batches/{batch_id}/cancel"):
            assert bob.post(path).status_code == 404
        assert bob.get(f"/v1/jobs/{job_id}/events").status_code == 404
        assert bob.get(f"/v1/files/{file_id}/content").status_code == 404
        assert bob.delete(f"/v1/files/{file_id}").status_code == 404
        assert bob.get("/v1/files").json()["data"] == []
        assert bob.get("/v1/batches").json()["data"] == []
        status = bob.get("/v1/status").json()
        assert (status["queues"], status["jobs"]) == ([], [])
        assert [job["id"] for job in alice.get("/v1/status").json()["jobs"]] == [job_id]
        assert bob.post("/v1/jobs", json={**JOB, "namespace": "alice"}).status_code == 403
    payload = read_payload(producer.redis.hget(job_key(job_id), "data"))
    assert payload is not None
    assert payload.namespace == "alice"


@pytest.mark.parametrize(
    ("asked", "status", "priority"),
    [(None, 202, "normal"), ("low", 202, "low"), ("normal", 202, "normal"), ("high", 403, None)],
)
def test_a_key_may_ask_for_its_priority_or_a_lower_one(
    guarded: RunningApi,
    add_key: AddKey,
    producer: Producer,
    asked: str | None,
    status: int,
    priority: str | None,
) -> None:
    with http_of(guarded, add_key("alice", priority="normal")) as client:
        fields = {} if asked is None else {"priority": asked}
        answer = client.post("/v1/jobs", json={**JOB, **fields})

    assert answer.status_code == status
    if priority is not None:
        payload = read_payload(producer.redis.hget(job_key(answer.json()["id"]), "data"))
        assert payload is not None
        assert payload.priority == priority


def test_requests_over_the_rate_are_told_when_to_come_back(
    guarded: RunningApi, add_key: AddKey
) -> None:
    slow, other = add_key("slow", requests_per_minute=2), add_key("other")
    with http_of(guarded, slow) as client:
        answers = [client.get("/v1/models") for _ in range(3)]

    assert [answer.status_code for answer in answers] == [200, 200, 429]
    assert 1 <= int(answers[2].headers["Retry-After"]) <= 31
    assert answers[2].json()["error"]["code"] == "rate_limit_exceeded"
    guarded.client(other).models.list()


def test_a_keys_queue_limit_is_its_own(guarded: RunningApi, add_key: AddKey, idle: str) -> None:
    few = add_key("few", namespace="few", max_queued=1)
    other = add_key("other", namespace="other")
    with http_of(guarded, few) as client:
        statuses = [
            client.post("/v1/jobs", json={**JOB, "model": idle}).status_code for _ in range(2)
        ]
    with http_of(guarded, other) as client:
        statuses.append(client.post("/v1/jobs", json={**JOB, "model": idle}).status_code)

    assert statuses == [202, 429, 202]


def test_the_log_names_callers_and_jobs_and_tells_no_prompt(
    guarded: RunningApi, add_key: AddKey
) -> None:
    key = add_key("alice")
    secret = "a secret that nobody should read"
    with structlog.testing.capture_logs() as lines, http_of(guarded, key) as client:
        for body in (
            {"model": ALIAS, "prompt": secret, "max_tokens": 2},
            {"model": ALIAS, "prompt": secret, "max_tokens": 5000},
            {"model": ALIAS, "prompt": secret, "max_tokens": secret},
            {"model": ALIAS, "prompt": secret, secret: secret},
        ):
            client.post(f"/v1/completions?{secret}", json=body)

    assert [line["status"] for line in lines] == [200, 400, 422, 400]
    assert {line["caller"] for line in lines} == {"alice"}
    assert len(lines[0]["job_ids"]) == 1
    assert secret not in repr(lines)
    assert key not in repr(lines)


def test_a_server_without_keys_serves_anyone(start_api: StartApi, worker: object) -> None:
    with httpx2.Client(base_url=start_api().url) as client:
        assert client.get("/v1/models").status_code == 200
        answer = client.post("/v1/jobs", json={**JOB, "namespace": "any", "priority": "high"})

    assert answer.status_code == 202
