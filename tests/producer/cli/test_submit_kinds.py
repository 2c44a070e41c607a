"""`headwater submit`: every kind of job, and what it says of the text, as options of their own."""

import json
from pathlib import Path
from typing import Any

import orjson
import pytest
from headwater.producer.cli import main
from headwater.producer.cli.following import _TextPrinter
from headwater.producer.stream_reader import Ended
from headwater.schemas import (
    Embedding,
    EntryId,
    Finished,
    GenerationJob,
    JobKind,
    ModelCard,
    NamedTool,
    Pooling,
    Score,
    Timings,
    TokenizerFiles,
    Usage,
    keys,
)
from redis import Redis
from tokenizers import Tokenizer, models, pre_tokenizers

from tests.producer.cli.test_chat_options import TEMPLATE, Outcome, submitted

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
FILES: dict[str, Any] = {
    "messages": [{"role": "user", "content": "b"}],
    "tools": [{"type": "function", "function": {"name": "g"}}],
    "schema": SCHEMA,
    "format": {"type": "choice", "choices": ["a", "b"]},
    "mixed": ["ab", [1, 2]],
    "ids": [[1, 2], [3]],
    "tokens": [1, 2, 3],
    "pairs": ["cd"],
}


@pytest.fixture
def submit(redis_url: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, redis: Redis):
    """Run `submit` for a model whose tokens are letters, and `dd`; files are named by their key."""
    letters = {letter: index for index, letter in enumerate("abcdefgh")} | {"dd": 8}
    tokenizer = Tokenizer(models.BPE(letters, [("d", "d")], unk_token="a"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    files = TokenizerFiles(tokenizer=json.loads(tokenizer.to_str()), chat_template=TEMPLATE)
    card = ModelCard(
        alias="demo",
        source="x",
        vocab_size=9,
        context_length=1000,
        tokenizer_fingerprint=files.fingerprint,
        enforces_tool_calls=True,
        adapters=("legal",),
    )
    redis.set(keys.model_card_key("demo"), card.encode())
    redis.set(keys.tokenizer_key(files.fingerprint), files.compress())
    for name, content in FILES.items():
        (tmp_path / name).write_bytes(orjson.dumps(content))

    def run(*options: str) -> Outcome:
        given = [str(tmp_path / option[1:]) if option[0] == "@" else option for option in options]
        with pytest.raises(SystemExit) as leaving:
            main(("submit", "--redis", redis_url, "--model", "demo", *given))
        return Outcome(int(leaving.value.code or 0), *capsys.readouterr())

    return run


def job_of(redis: Redis, outcome: Outcome) -> GenerationJob:
    assert outcome.code == 0, outcome.err
    return submitted(redis, outcome.out.strip())


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (("--prompt", "ab", "--continuation", "cd", "--continuation", "d"), ((2, 3), (3,))),
        (("--prompt", "ab", "--continuations", "@mixed"), ((0, 1), (1, 2))),
        (("--messages", "@messages", "--continuations", "@pairs"), ((2, 3),)),
        (("--tokens", "@tokens", "--continuations", "@ids"), ((1, 2), (3,))),
    ],
)
def test_continuations_are_scored(submit, redis: Redis, options, expected) -> None:
    """They are texts behind the prompt, or token ids as they are."""
    job = job_of(redis, submit("--kind", "score", *options))
    assert (job.kind, job.continuations, job.max_tokens) == (JobKind.SCORE, expected, 1)


def test_an_embedding_is_asked_for(submit, redis: Redis) -> None:
    """Pooling and scaling are options, max_tokens means nothing."""
    plain = job_of(redis, submit("--kind", "embedding", "--prompt", "ab"))
    assert (plain.kind, plain.pooling, plain.normalize) == (
        JobKind.EMBEDDING,
        Pooling.LAST,
        True,
    )
    options = ("--pooling", "mean", "--raw", "--adapter", "legal")
    other = job_of(redis, submit("--kind", "embedding", "--prompt", "ab", *options))
    assert (other.pooling, other.normalize, other.adapter) == (Pooling.MEAN, False, "legal")


def test_formats_and_logprobs_are_asked_for(submit, redis: Redis) -> None:
    """A file that is no response format is a schema of one."""
    options = ("--prompt", "ab", "--logprobs", "2", "--prompt-logprobs", "0")
    job = job_of(redis, submit(*options, "--response-format", "@schema"))
    assert (job.logprobs, job.prompt_logprobs) == (2, 0)
    assert job.response_format.json_schema == SCHEMA
    job = job_of(redis, submit("--prompt", "ab", "--response-format", "@format"))
    assert job.response_format.choices == ("a", "b")


def test_a_call_is_forced_by_its_tools_name(submit, redis: Redis) -> None:
    """With none, the tools are not shown to the model at all."""
    chat = ("--messages", "@messages", "--tools", "@tools", "--tool-choice")
    named = job_of(redis, submit(*chat, "g"))
    assert isinstance(named.tool_choice, NamedTool)
    assert job_of(redis, submit(*chat, "required")).tool_choice == "required"
    none = job_of(redis, submit(*chat, "none"))
    assert (none.tool_choice, none.tools) == ("none", ())
    assert len(named.prompt_token_ids) == len(none.prompt_token_ids) + 1


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (("--prompt", "a", "--kind", "score"), "go with --kind score"),
        (("--prompt", "a", "--continuation", "b"), "go with --kind score"),
        (("--prompt", "a", "--kind", "vector"), "'generate', 'score' or 'embedding'"),
        (("--prompt", "a", "--tool-choice", "required"), "go with --messages"),
        (("--messages", "@messages", "--tool-choice", "required"), "none such"),
        (("--prompt", "a", "--adapter", "other"), "it has: legal"),
        (("--prompt", "cd", "--kind", "score", "--continuation", "d"), "changes the tokens"),
        (("--tokens", "@tokens", "--kind", "score", "--continuation", "d"), "token ids, too"),
        (("--prompt", "a", "--kind", "embedding", "--logprobs", "1"), "means nothing"),
        (("--prompt", "a", "--response-format", "@tokens"), "must hold a JSON object"),
        (("--prompt", "a", "--prompt-logprobs", "21"), "prompt_logprobs"),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(submit, redis: Redis, options, problem) -> None:
    """Nothing is submitted."""
    outcome = submit(*options)
    assert outcome.code != 0
    assert problem in " ".join(outcome.err.split())
    assert redis.keys("rq:job:*") == []


def test_scores_and_vectors_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    """A line for each continuation; the vector as JSON."""
    usage, timings = Usage(prompt_tokens=1, completion_tokens=0), Timings(total_ms=1.0)
    scores = (
        Score(continuation=0, logprobs=(-1.5, -0.25), is_greedy=False),
        Score(continuation=1, logprobs=(-0.5,), is_greedy=True),
    )
    end = Finished(scores=scores, usage=usage, timings=timings)
    _TextPrinter().print(Ended(EntryId(1, 1), end))
    assert capsys.readouterr().out == "0 -1.750000\n1 -0.500000 greedy\n"

    vector = Embedding.of(b"\x00\x00\x80\x3f\x00\x00\x00\xbf")
    end = Finished(embedding=vector, usage=usage, timings=timings)
    _TextPrinter().print(Ended(EntryId(1, 1), end))
    assert capsys.readouterr().out == "[1.0,-0.5]\n"
