"""What goes wrong is told in OpenAI's shape, by name, and before it reaches the queue."""

from collections.abc import Iterator
from typing import Any

import httpx2
import openai
import pytest
from openai import OpenAI

from .conftest import ALIAS, StartApi

CHAT: dict[str, Any] = {"model": ALIAS, "messages": [{"role": "user", "content": "Hello"}]}


def test_an_unknown_model_is_not_found(client: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.chat.completions.create(**{**CHAT, "model": "gpt-4.1"})

    assert caught.value.code == "model_not_found"
    assert "known: tiny" in str(caught.value)
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-4.1")


@pytest.mark.parametrize(
    "fields",
    [
        {"max_tokens": 5000},
        {"messages": [{"role": "user", "content": "x" * 5000}]},
    ],
    ids=["max_tokens", "prompt"],
)
def test_what_does_not_fit_the_context_is_refused(client: OpenAI, fields: dict[str, Any]) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**{**CHAT, **fields})

    assert caught.value.code == "context_length_exceeded"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -1),
        ("temperature", "warm"),
        ("top_p", 1.5),
        ("n", 0),
        ("n", 1.5),
        ("max_tokens", 0),
        ("stop", [""]),
        ("stop", 5),
        ("seed", -1),
        ("presence_penalty", 3),
        ("stream", "sometimes"),
        ("messages", []),
        ("messages", "Hello"),
        ("stream_options", {"continuous": True}),
        ("priority", "urgent"),
        ("tool_choice", "required"),
        ("logprobs", "many"),
        ("response_format", {"type": "json_schema"}),
        ("response_format", {"type": "xml"}),
    ],
)
def test_a_wrong_value_is_refused_by_name(client: OpenAI, field: str, value: Any) -> None:
    with pytest.raises(openai.UnprocessableEntityError) as caught:
        client.chat.completions.create(**CHAT, extra_body={field: value})

    assert field in str(caught.value)
    assert caught.value.code == "invalid_value"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("modalities", ["audio"]),
        ("best_of", 3),
        ("suffix", "x"),
        ("functions", [{"name": "f"}]),
        ("service_tier", "priority"),
        ("store", True),
        ("temprature", 0.5),
        ("job_id", "mine"),
        ("namespace", "others"),
        ("tokenizer_fingerprint", "x"),
    ],
)
def test_a_field_that_we_do_not_have_is_refused_by_name(
    client: OpenAI, field: str, value: Any
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**CHAT, extra_body={field: value})

    assert caught.value.code == "unsupported_parameter"
    assert caught.value.param == field


def test_values_that_ask_for_nothing_pass(client: OpenAI) -> None:
    nothing = {
        "store": False,
        "service_tier": "auto",
        "functions": [],
        "user": "me",
        "stop": None,
        "max_completion_tokens": None,
        "response_format": {"type": "text"},
        "tools": [],
        "tool_choice": "none",
        "parallel_tool_calls": True,
        "presence_penalty": 0,
        "logit_bias": None,
        "n": None,
    }
    reply = client.chat.completions.create(**CHAT, max_tokens=2, extra_body=nothing)

    assert len(reply.choices) == 1


@pytest.mark.parametrize(
    ("messages", "word"),
    [
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
            "image",
        ),
        ([{"role": "user", "content": [7]}], "int"),
    ],
)
def test_content_that_is_no_text_is_refused(client: OpenAI, messages: Any, word: str) -> None:
    with pytest.raises(openai.BadRequestError, match=word):
        client.chat.completions.create(model=ALIAS, messages=messages)


@pytest.mark.parametrize("prompt", ["", [], [[]], [""], ["x", ""], [1, -1], [1, "x"], 5, None])
def test_a_prompt_that_is_none_is_refused(http: httpx2.Client, prompt: Any) -> None:
    answer = http.post("/v1/completions", json={"model": ALIAS, "prompt": prompt})

    assert answer.status_code in (400, 422)
    assert "prompt" in answer.json()["error"]["message"]


def test_token_ids_beyond_the_vocabulary_are_refused(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="token ids 0 to 256"):
        client.completions.create(model=ALIAS, prompt=[5, 257])


@pytest.mark.parametrize(
    ("content", "status"),
    [
        (b"{", 400),
        (b"\xff\xfe", 400),
        (b"[]", 422),
        (b'"text"', 422),
        (b'{"model": "tiny", "prompt": "\\ud800"}', 400),
        (b'{"prompt": "x"}', 422),
    ],
)
def test_a_body_that_is_no_request_is_refused(
    http: httpx2.Client, content: bytes, status: int
) -> None:
    headers = {"Content-Type": "application/json"}

    answer = http.post("/v1/completions", content=content, headers=headers)

    assert answer.status_code == status
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


def test_a_body_without_its_content_type_is_told_to_name_it(http: httpx2.Client) -> None:
    """`curl -d` sends a form's content type unless it is told otherwise."""
    headers = {"Content-Type": "application/x-www-form-urlencoded"}

    answer = http.post("/v1/completions", content=b'{"model": "tiny"}', headers=headers)

    assert answer.status_code == 415
    assert "Content-Type: application/json" in answer.json()["error"]["message"]


def test_unknown_routes_and_methods_have_the_same_shape(http: httpx2.Client) -> None:
    for path, status in (("/v1/nothing", 404), ("/v1/completions", 405)):
        answer = http.get(path)

        assert answer.status_code == status
        assert answer.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("is_announced", [True, False])
def test_a_body_over_the_limit_is_refused(
    start_api: StartApi, worker: Any, is_announced: bool
) -> None:
    limited = start_api(max_body_mb=1)
    body = b'{"model": "tiny", "prompt": "' + b"x" * 2**20 + b'"}'

    def pieces() -> Iterator[bytes]:
        yield from (body[start : start + 65536] for start in range(0, len(body), 65536))

    with httpx2.Client(base_url=limited.url) as client:
        answer = client.post(
            "/v1/completions",
            content=body if is_announced else pieces(),
            headers={"Content-Type": "application/json"},
        )

    assert answer.status_code == 413
    assert answer.json()["error"]["code"] == "payload_too_large"


def test_a_full_queue_says_when_to_come_back(start_api: StartApi, idle: str) -> None:
    body = {"model": idle, "prompt_token_ids": [1], "max_tokens": 1}
    with httpx2.Client(base_url=start_api(max_queue_depth=2).url) as client:
        answers = [client.post("/v1/jobs", json=body) for _ in range(3)]
        answers.append(client.post("/v1/completions", json={"model": idle, "prompt": "x"}))

    assert [answer.status_code for answer in answers] == [202, 202, 429, 429]
    for answer in answers[2:]:
        assert int(answer.headers["Retry-After"]) > 0
        assert answer.json()["error"]["code"] == "queue_full"
        assert answer.json()["error"]["type"] == "rate_limit_error"


def test_other_sites_pages_may_not_read_answers(http: httpx2.Client) -> None:
    answer = http.get("/v1/models", headers={"Origin": "https://elsewhere.example"})

    assert "access-control-allow-origin" not in answer.headers
