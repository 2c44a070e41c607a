import subprocess
import sys
from typing import Any

import orjson
import pytest
from headwater.producer.bulk.lines import Line
from headwater.producer.bulk.preparation import Preparation
from headwater.producer.bulk.rows import ReadyRow, RefusedRow, Row, RowParser, RowSettings
from headwater.producer.openai_protocol.routes import CHAT as CHAT_ROUTE
from headwater.producer.openai_protocol.routes import EMBEDDING, TEXT
from headwater.schemas import ModelCard, StreamMode, TokenizerFiles

CHAT_URL = "/v1/chat/completions"


def ready(row: Row) -> ReadyRow:
    assert isinstance(row, ReadyRow), row
    return row


def refused(row: Row) -> RefusedRow:
    assert isinstance(row, RefusedRow), row
    return row


def openai(body: Any, url: str = CHAT_URL, **fields: Any) -> dict[str, Any]:
    return {"custom_id": "one", "method": "POST", "url": url, "body": body, **fields}


def line(value: Any, number: int = 7) -> Line:
    return Line(number, value if isinstance(value, bytes) else orjson.dumps(value))


CHAT = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    ("fields", "num_prompt_tokens", "route"),
    [
        ({"prompt": "hello"}, 5, TEXT),
        ({"prompt_token_ids": [1, 2, 3]}, 3, TEXT),
        ({"messages": CHAT}, len("<user>hi"), CHAT_ROUTE),
        (openai({"model": "tiny", "messages": CHAT}), len("<user>hi"), CHAT_ROUTE),
        (openai({"model": "tiny", "prompt": "hello"}, "/v1/completions"), 5, TEXT),
    ],
)
def test_every_form_of_row_becomes_a_job_with_its_text_at_the_end(
    parser: RowParser, fields: dict[str, Any], num_prompt_tokens: int, route: str
) -> None:
    row = ready(parser.parse(line(fields)))

    (job,) = row.jobs
    assert len(job.prompt_token_ids) == num_prompt_tokens
    assert job.max_tokens == 4
    assert job.stream is StreamMode.FINAL
    assert job.priority == "low"
    assert row.route == route
    assert row.custom_id == ("one" if "url" in fields else "line-7")


def test_a_rows_own_fields_win_over_the_runs(parser: RowParser) -> None:
    plain = ready(parser.parse(line({"prompt": "a", "max_tokens": 9, "priority": "high"})))
    chat = ready(
        parser.parse(line(openai({"messages": CHAT, "max_completion_tokens": 9, "top_k": 3})))
    )

    assert (plain.jobs[0].max_tokens, plain.jobs[0].priority) == (9, "high")
    assert (chat.jobs[0].max_tokens, chat.jobs[0].sampling.top_k) == (9, 3)


def test_plain_rows_are_greedy_and_openais_have_its_temperature(parser: RowParser) -> None:
    plain = ready(parser.parse(line({"messages": CHAT})))
    chat = ready(parser.parse(line(openai({"messages": CHAT}))))

    assert plain.jobs[0].sampling.temperature == 0.0
    assert chat.jobs[0].sampling.temperature == 1.0


def test_a_row_of_several_prompts_has_a_job_for_each(parser: RowParser) -> None:
    row = ready(parser.parse(line({"prompt": ["a", "bc"]})))

    assert [len(job.prompt_token_ids) for job in row.jobs] == [1, 2]


def test_an_embedding_row_has_a_job_for_each_input_and_no_texts_settings(
    parser: RowParser,
) -> None:
    body = {"input": ["a", "bc"], "pooling": "mean", "encoding_format": "base64"}
    row = ready(parser.parse(line(openai(body, "/v1/embeddings"))))

    assert (row.route, row.encoding) == (EMBEDDING, "base64")
    assert [len(job.prompt_token_ids) for job in row.jobs] == [1, 2]
    assert {(job.kind, job.pooling, job.priority) for job in row.jobs} == {
        ("embedding", "mean", "low")
    }


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"{", "not JSON"),
        (b"[1,2]", "must hold an object, not list"),
        (b"null", "must hold an object, not NoneType"),
        (b'"x"', "must hold an object, not str"),
        (b'{"prompt":"\\ud800"}', "not JSON"),
        (b'{"prompt":"\xff"}', "not JSON"),
        (b"{}", "exactly one of messages, prompt, prompt_token_ids"),
        (b'{"prompt":"a","messages":[]}', "exactly one of"),
        (b'{"prompt":""}', "the prompt is empty"),
        (b'{"prompt":7}', "prompt"),
        (b'{"prompt_token_ids":[]}', "prompt"),
        (b'{"prompt_token_ids":[256]}', "token ids 0 to 255"),
        (b'{"prompt_token_ids":[-1]}', "prompt"),
        (b'{"prompt":"a","custom_id":7}', "custom_id must be a text"),
        (b'{"prompt":"a","max_tokens":0}', "max_tokens"),
        (b'{"prompt":"a","max_tokens":64}', "context"),
        (orjson.dumps({"prompt": "a" * 100}), "context"),
        (b'{"prompt":"a","model":"gpt-x"}', "--override-model"),
        (b'{"prompt":"a","stream":true}', "has no streams"),
        (b'{"prompt":"a","nonsense":1}', "'nonsense' is not supported"),
        (orjson.dumps(openai("s")), "body must be an object"),
        (orjson.dumps(openai({}, method="GET")), "method must be POST"),
        (orjson.dumps(openai({}, extra=1)), "unknown field 'extra'"),
        (orjson.dumps(openai({}, url="/v1/images")), "'/v1/images' is not supported"),
        (orjson.dumps(openai({"dimensions": 3}, url="/v1/embeddings")), "input"),
        (orjson.dumps(openai({"messages": []})), "messages"),
        (orjson.dumps(openai({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]})),
         "text only"),
    ],
)  # fmt: skip
def test_a_bad_row_is_refused_with_its_line_and_the_reason(
    parser: RowParser, data: bytes, said: str
) -> None:
    row = refused(parser.parse(line(data)))

    message = row.body["error"]["message"]
    assert message.startswith("line 7: ")
    assert said in message
    assert 400 <= row.status < 500


def test_a_refused_row_keeps_its_custom_id(parser: RowParser) -> None:
    assert refused(parser.parse(line(openai("s")))).custom_id == "one"
    assert refused(parser.parse(line(b"{"))).custom_id == "line-7"


def test_a_line_that_could_not_be_read_is_refused(parser: RowParser) -> None:
    row = refused(parser.parse(Line(3, b"", "the line has 99 bytes; at most 10")))

    assert row.body["error"]["message"] == "line 3: the line has 99 bytes; at most 10"


def test_the_run_may_override_models_and_seeds(card: ModelCard, files: TokenizerFiles) -> None:
    settings = RowSettings("tiny", override_model=True, seed=100, defaults={"max_tokens": 1})
    parser = Preparation(settings, card, files).parser()

    mine = ready(parser.parse(line({"prompt": "a", "model": "gpt-x"})))
    own = ready(parser.parse(line({"prompt": "a", "seed": 5})))

    assert (mine.jobs[0].model, mine.jobs[0].sampling.seed) == ("tiny", 107)
    assert own.jobs[0].sampling.seed == 5


def test_bulk_runs_need_neither_the_http_server_nor_mlx() -> None:
    code = """
import sys
import headwater.producer.generate, headwater.producer.bulk.order
print(sorted({"fastapi", "uvicorn", "mlx", "prometheus_client"} & sys.modules.keys()))
"""

    found = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)

    assert found.stdout.strip() == b"[]"
