"""Files and batches, through the official client and across restarts of the server."""

import base64
import json
import time
from pathlib import Path
from typing import Any

import openai
import pytest
from headwater.producer.api.batch_runner import DirectoryInUse
from headwater.producer.client import Producer
from openai import OpenAI

from .conftest import ALIAS, RunningApi, StartApi

ENDED = ("completed", "failed", "expired", "cancelled")


def row(custom_id: str, **body: Any) -> dict[str, Any]:
    fields = {"model": ALIAS, "prompt": custom_id, "max_tokens": 4, "temperature": 0}
    return {
        "custom_id": custom_id,
        "method": "POST",
        "url": "/v1/completions",
        "body": {**fields, **body},
    }


def upload(client: OpenAI, *lines: dict[str, Any] | bytes) -> str:
    parts = (line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines)
    return client.files.create(file=("in.jsonl", b"\n".join(parts)), purpose="batch").id


def start(client: OpenAI, *lines: dict[str, Any] | bytes, **fields: Any) -> str:
    asked = {"endpoint": "/v1/completions", "completion_window": "24h", **fields}
    return client.batches.create(input_file_id=upload(client, *lines), **asked).id


def wait(client: OpenAI, batch_id: str) -> Any:
    """Ask until the batch has ended, as every client has to."""
    deadline = time.monotonic() + 60
    while (batch := client.batches.retrieve(batch_id)).status not in ENDED:
        assert time.monotonic() < deadline, batch
    return batch


def rows_of(client: OpenAI, file_id: str | None) -> list[Any]:
    if file_id is None:
        return []
    return [json.loads(line) for line in client.files.content(file_id).text.splitlines()]


def test_a_batch_runs_from_file_to_file(client: OpenAI) -> None:
    names = [f"row {number}" for number in range(100)]
    batch_id = start(client, *map(row, names), metadata={"mine": "yes"})

    batch = wait(client, batch_id)

    assert batch.status == "completed"
    assert batch.metadata == {"mine": "yes"}
    assert batch.request_counts.model_dump() == {"total": 100, "completed": 100, "failed": 0}
    assert batch.error_file_id is None
    assert batch.created_at <= batch.in_progress_at <= batch.finalizing_at <= batch.completed_at
    rows = {each["custom_id"]: each for each in rows_of(client, batch.output_file_id)}
    assert sorted(rows) == sorted(names)
    alone = client.completions.create(**row("row 7")["body"])
    response = rows["row 7"]["response"]
    assert response["status_code"] == 200
    assert response["body"]["choices"][0]["text"] == alone.choices[0].text
    assert response["body"]["usage"]["completion_tokens"] == 4
    assert rows["row 7"]["error"] is None
    note = client.files.retrieve(batch.output_file_id)
    assert note.purpose == "batch_output"
    assert note.bytes == len(client.files.content(batch.output_file_id).content)


def test_chats_run_in_batches_too(client: OpenAI) -> None:
    chat = {
        "custom_id": "a",
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": {
            "model": ALIAS,
            "messages": [{"role": "user", "content": "Hi"}],
            "max_tokens": 3,
            "n": 2,
        },
    }
    batch = wait(client, start(client, chat, endpoint="/v1/chat/completions"))

    (done,) = rows_of(client, batch.output_file_id)
    assert [c["message"]["role"] for c in done["response"]["body"]["choices"]] == ["assistant"] * 2


def test_embeddings_run_in_batches_and_equal_those_asked_for_at_once(client: OpenAI) -> None:
    """Each row's vectors stand in its input's order, as the row's encoding has them."""
    inputs: list[str | list[str]] = ["Once upon a time", ["there was", "a queue"]]
    rows = [_embedding_row(f"row {number}", input=text) for number, text in enumerate(inputs)]
    bad = _embedding_row("bad", input="x", dimensions=8)
    packed = _embedding_row("packed", input="Once upon a time", encoding_format="base64")
    batch = wait(client, start(client, *rows, bad, packed, endpoint="/v1/embeddings"))

    assert batch.request_counts.model_dump() == {"total": 4, "completed": 3, "failed": 1}
    done = {each["custom_id"]: each["response"] for each in rows_of(client, batch.output_file_id)}
    for number, text in enumerate(inputs):
        alone = client.embeddings.create(model=ALIAS, input=text, encoding_format="float")
        body = done[f"row {number}"]["body"]
        assert [each["index"] for each in body["data"]] == list(range(len(alone.data)))
        for one, other in zip(body["data"], alone.data, strict=True):
            assert one["embedding"] == pytest.approx(other.embedding, abs=1e-5)
        assert body["usage"]["prompt_tokens"] == alone.usage.prompt_tokens
    vector = base64.b64decode(done["packed"]["body"]["data"][0]["embedding"])
    first = done["row 0"]["body"]["data"][0]["embedding"]
    assert len(vector) == 4 * len(first)
    (failed,) = rows_of(client, batch.error_file_id)
    assert "dimensions" in failed["response"]["body"]["error"]["message"]


def _embedding_row(custom_id: str, **body: Any) -> dict[str, Any]:
    fields = {"model": ALIAS, "encoding_format": "float", **body}
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/embeddings", "body": fields}


BAD_LINES: list[tuple[bytes | dict[str, Any], str]] = [
    (b"{", "not JSON"),
    (b"\xff", "not JSON"),
    (b"[1, 2]", "object"),
    (b"null", "object"),
    ({**row("a"), "body": "s"}, "body must be an object"),
    ({**row("b"), "method": "GET"}, "method"),
    ({**row("c"), "url": "/v1/chat/completions"}, "url"),
    (row("d", stream=True), "no streams"),
    (row("e", max_tokens=5000), "context"),
    (row("f", model="nobody"), "unknown model"),
    (row("g", temperature=-1), "temperature"),
    (row("h", best_of=2), "best_of"),
    ({"method": "POST", "url": "/v1/completions", "body": {}}, "custom_id"),
    (row("i", prompt=None), "prompt"),
    ({**row("j"), "more": 1}, "'more'"),
    (row("good"), "line 1 already"),
]


def test_a_bad_row_stands_in_the_error_file_and_the_others_run(client: OpenAI) -> None:
    lines = [row("good"), b"", b" ", *(line for line, _ in BAD_LINES), row("good too")]
    batch = wait(client, start(client, *lines))

    assert batch.status == "completed"
    counts = {"total": len(BAD_LINES) + 2, "completed": 2, "failed": len(BAD_LINES)}
    assert batch.request_counts.model_dump() == counts
    done = rows_of(client, batch.output_file_id)
    assert sorted(each["custom_id"] for each in done) == ["good", "good too"]
    failed = {
        int(each["id"].rpartition("-")[2]): each for each in rows_of(client, batch.error_file_id)
    }
    assert sorted(failed) == list(range(4, 4 + len(BAD_LINES)))
    for number, (line, words) in enumerate(BAD_LINES, 4):
        response = failed[number]["response"]
        assert response["status_code"] >= 400
        assert words in response["body"]["error"]["message"]
        own_id = line.get("custom_id") if isinstance(line, dict) else None
        assert failed[number]["custom_id"] == own_id


def test_a_byte_order_mark_and_windows_lines_harm_nothing(client: OpenAI) -> None:
    text = b"\xef\xbb\xbf" + json.dumps(row("a")).encode() + b"\r\n" + json.dumps(row("b")).encode()
    batch = wait(client, start(client, text + b"\r\n"))

    assert batch.request_counts.model_dump() == {"total": 2, "completed": 2, "failed": 0}


@pytest.mark.parametrize("lines", [[], [b"", b"  "], [b"{", b"7"]], ids=["empty", "blank", "bad"])
def test_a_file_without_any_good_row_fails_as_a_whole(client: OpenAI, lines: list[bytes]) -> None:
    batch = wait(client, start(client, *lines))

    assert batch.status == "failed"
    assert batch.errors.data[0].message
    assert batch.output_file_id is batch.error_file_id is None


def test_wrong_files_and_endpoints_are_refused(client: OpenAI) -> None:
    file_id = upload(client, row("a"))
    asked: dict[str, Any] = {"completion_window": "24h", "input_file_id": file_id}

    with pytest.raises(openai.BadRequestError, match="endpoint"):
        client.batches.create(**asked, endpoint="/v1/responses")
    with pytest.raises(openai.NotFoundError):
        client.batches.create(**{**asked, "input_file_id": "file-x"}, endpoint="/v1/completions")
    with pytest.raises(openai.UnprocessableEntityError):
        client.batches.create(
            **{**asked, "completion_window": "1h"},  # type: ignore[arg-type]
            endpoint="/v1/completions",
        )
    with pytest.raises(openai.BadRequestError, match="purpose"):
        client.files.create(file=b"{}", purpose="fine-tune")
    for path in ("../batches/x", "file-../../x", "file-x.json"):
        with pytest.raises(openai.NotFoundError):
            client.files.retrieve(path.replace("/", "%2F"))


def test_files_are_listed_newest_first_and_deleted(start_api: StartApi, worker: object) -> None:
    client = start_api().client()
    ids = [upload(client, row(name)) for name in ("a", "b", "c")]

    listed = [note.id for note in client.files.list()]
    assert sorted(listed) == sorted(ids)
    assert [note.id for note in client.files.list(limit=2)] == listed
    assert client.files.content(ids[0]).content == json.dumps(row("a")).encode()

    client.files.delete(ids[0])

    with pytest.raises(openai.NotFoundError):
        client.files.content(ids[0])
    assert ids[0] not in [note.id for note in client.files.list()]


def test_a_cancelled_batch_keeps_what_is_done_and_accounts_for_the_rest(
    client: OpenAI, idle: str
) -> None:
    quick = [row(f"quick {number}") for number in range(5)]
    stuck = [row(f"stuck {number}", model=idle) for number in range(100)]
    batch_id = start(client, *quick, *stuck)
    while client.batches.retrieve(batch_id).request_counts.completed < len(quick):
        pass

    assert client.batches.cancel(batch_id).status == "cancelling"
    batch = wait(client, batch_id)

    assert batch.status == "cancelled"
    assert batch.cancelling_at <= batch.cancelled_at
    done = [each["custom_id"] for each in rows_of(client, batch.output_file_id)]
    failed = rows_of(client, batch.error_file_id)
    assert sorted(done) == [each["custom_id"] for each in quick]
    assert sorted(each["custom_id"] for each in failed) == sorted(
        each["custom_id"] for each in stuck
    )
    assert {each["error"]["code"] for each in failed} == {"batch_cancelled"}
    with pytest.raises(openai.ConflictError):
        client.batches.cancel(batch_id)


def test_batches_are_listed_page_by_page(start_api: StartApi, worker: object) -> None:
    client = start_api().client()
    ids = {start(client, row("a")) for _ in range(3)}

    assert {batch.id for batch in client.batches.list(limit=1)} == ids


def test_a_batch_goes_on_after_a_restart_and_runs_no_row_twice(
    start_api: StartApi, worker: object, producer: Producer, tmp_path: Path
) -> None:
    settings: dict[str, Any] = {"data_dir": tmp_path, "batch_rows_in_flight": 8}
    names = [f"row {number}" for number in range(60)]
    api = start_api(**settings)
    batch_id = start(api.client(), *(row(name, max_tokens=30, ignore_eos=True) for name in names))
    for target in (10, 30):
        while api.client().batches.retrieve(batch_id).request_counts.completed < target:
            pass
        api.stop()
        api = start_api(**settings)

    batch = wait(api.client(), batch_id)

    assert batch.status == "completed"
    assert batch.request_counts.model_dump() == {"total": 60, "completed": 60, "failed": 0}
    done = rows_of(api.client(), batch.output_file_id)
    assert sorted(each["custom_id"] for each in done) == sorted(names)
    jobs = [each.decode() for each in producer.redis.scan_iter(f"rq:job:{batch_id}-*")]
    assert len(jobs) == 60


def test_a_cancelled_batch_ends_after_a_restart(
    start_api: StartApi, idle: str, tmp_path: Path
) -> None:
    api = start_api(data_dir=tmp_path)
    batch_id = start(api.client(), row("quick"), *(row(f"{n}", model=idle) for n in range(5)))
    while api.client().batches.retrieve(batch_id).request_counts.completed < 1:
        pass
    api.client().batches.cancel(batch_id)
    api.stop()

    client = start_api(data_dir=tmp_path).client()
    batch = wait(client, batch_id)

    assert batch.status == "cancelled"
    assert [each["custom_id"] for each in rows_of(client, batch.output_file_id)] == ["quick"]
    assert len(rows_of(client, batch.error_file_id)) == 5


def test_a_full_queue_makes_a_batch_wait_and_not_fail(start_api: StartApi, worker: object) -> None:
    client = start_api(max_queue_depth=1).client()

    batch = wait(client, start(client, *(row(f"{number}") for number in range(12))))

    assert batch.request_counts.model_dump() == {"total": 12, "completed": 12, "failed": 0}


def test_a_directory_belongs_to_one_server(
    start_api: StartApi, api: RunningApi, tmp_path: Path
) -> None:
    start_api(data_dir=tmp_path)

    with pytest.raises(DirectoryInUse, match="--data-dir"):
        start_api(data_dir=tmp_path)


def test_a_server_that_is_told_twice_to_end_lets_go_of_its_directory(
    start_api: StartApi, tmp_path: Path
) -> None:
    """The second signal spares the wait for requests, not the order at the end."""
    api = start_api(data_dir=tmp_path)
    api.server.force_exit = True
    api.stop()

    start_api(data_dir=tmp_path)
