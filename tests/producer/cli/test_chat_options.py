"""`headwater submit --messages`: tools, template options, and a final message to go on with."""

import json
from pathlib import Path
from typing import NamedTuple

import orjson
import pytest
from headwater.producer.cli import main
from headwater.producer.client_queue import read_payload
from headwater.schemas import GenerationJob, ModelCard, TokenizerFiles, keys
from redis import Redis
from tokenizers import Tokenizer, models, pre_tokenizers

TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool.function.name }}{% endfor %}"
    "{% for message in messages %}{{ message.content }}d{% endfor %}"
    "{% if add_generation_prompt %}{{ 'f' if enable_thinking else 'h' }}{% endif %}"
)
TOOLS = [{"type": "function", "function": {"name": "g"}}]


class Outcome(NamedTuple):
    code: int
    out: str
    err: str


@pytest.fixture
def submit(redis_url: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, redis: Redis):
    """Run `submit --messages` for a model whose tokens are letters."""
    letters = {letter: index for index, letter in enumerate("abcdefgh")}
    tokenizer = Tokenizer(models.WordLevel(letters, unk_token="a"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    files = TokenizerFiles(tokenizer=json.loads(tokenizer.to_str()), chat_template=TEMPLATE)
    card = ModelCard(
        alias="demo",
        source="x",
        vocab_size=8,
        context_length=1000,
        tokenizer_fingerprint=files.fingerprint,
    )
    redis.set(keys.model_card_key("demo"), card.encode())
    redis.set(keys.tokenizer_key(files.fingerprint), files.compress())
    messages, tools = tmp_path / "messages.json", tmp_path / "tools.json"
    messages.write_text('[{"role": "user", "content": "b"}, {"role": "assistant", "content": "c"}]')
    tools.write_bytes(orjson.dumps(TOOLS))

    def run(*options: str, form: tuple[str, ...] = ("--messages", str(messages))) -> Outcome:
        given = [str(tools) if option == "TOOLS" else option for option in options]
        with pytest.raises(SystemExit) as leaving:
            main(("submit", "--redis", redis_url, "--model", "demo", *form, *given))
        return Outcome(int(leaving.value.code or 0), *capsys.readouterr())

    return run


def submitted(redis: Redis, job_id: str) -> GenerationJob:
    job = read_payload(redis.hget(f"rq:job:{job_id}", "data"))
    assert job is not None
    return job


@pytest.mark.parametrize(
    ("options", "letters"),
    [
        ((), "bdcdh"),
        (("--tools", "TOOLS"), "gbdcdh"),
        (("--template-options", '{"enable_thinking": true}'), "bdcdf"),
        (("--continue-final-message",), "bdc"),
    ],
)
def test_options_reach_the_chat_template(submit, redis: Redis, options, letters) -> None:
    job = submitted(redis, submit(*options).out.strip())

    assert job.prompt_token_ids == tuple(ord(letter) - ord("a") for letter in letters)


def test_the_job_carries_the_tools_for_the_worker_to_read_calls_by(submit, redis: Redis) -> None:
    job = submitted(redis, submit("--tools", "TOOLS").out.strip())

    assert list(job.tools) == TOOLS


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (("--template-options", "{"), "no JSON"),
        (("--template-options", "[]"), "must be an object"),
        (("--template-options", '{"messages": []}'), "messages"),
    ],
)
def test_options_that_make_no_sense_are_refused_by_name(submit, options, problem) -> None:
    outcome = submit(*options)

    assert outcome.code != 0
    assert problem in outcome.err.replace("\n", " ")


def test_options_of_chats_are_refused_for_plain_prompts(submit) -> None:
    outcome = submit("--continue-final-message", form=("--prompt", "abc"))

    assert outcome.code != 0
    assert "--messages" in outcome.err
