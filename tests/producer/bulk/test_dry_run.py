"""`headwater bulk --dry-run`: everything but the generation, on a model that nobody runs."""

import gzip
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import orjson
import pytest
from headwater.schemas import ModelCard, TokenizerFiles, keys
from redis import Redis


class Outcome(NamedTuple):
    code: int
    out: str
    err: str
    max_rss_mb: float


@pytest.fixture
def server(redis_url: str, redis: Redis, card: ModelCard, files: TokenizerFiles) -> str:
    """A server on which a worker has announced the model."""
    redis.set(keys.model_card_key("tiny"), card.encode())
    redis.set(keys.tokenizer_key(card.tokenizer_fingerprint), files.compress())
    return redis_url


_MEASURED = """
import resource, subprocess, sys
code = subprocess.call(sys.argv[2:])
with open(sys.argv[1], "w") as file:
    file.write(str(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss))
sys.exit(code)
"""
"""Runs a command from a small process: a peak starts at what its parent had when it forked."""


def run(folder: Path, url: str, source: str, *options: str, stdin: bytes = b"") -> Outcome:
    command = [sys.executable, "-m", "headwater.producer.cli", "bulk", source, "--dry-run"]
    peak = folder / "peak"
    result = subprocess.run(
        [
            *(sys.executable, "-c", _MEASURED, str(peak)),
            *(*command, "--redis", url, "--model", "tiny", "--max-tokens", "4", *options),
        ],
        input=stdin,
        capture_output=True,
        check=False,
    )
    out, err = result.stdout.decode(), result.stderr.decode()
    return Outcome(result.returncode, out, err, int(peak.read_text()) / 1024)


def test_every_bad_row_is_named_with_its_line_and_the_others_count(
    tmp_path: Path, server: str
) -> None:
    lines = [
        b'\xef\xbb\xbf{"prompt":"one","custom_id":"x"}\r',
        b"",
        '{"prompt":"line\u2028separator"}'.encode(),
        b"[1,2]",
        b"nonsense",
        b'{"prompt":"\\udc00"}',
        b'{"prompt":"two","custom_id":"x"}',
        b'{"prompt":"' + b"y" * 2**20 + b'"}',
        b'{"prompt":"' + b"y" * 80 + b'"}',
        b'{"url":"/v1/images","body":{"input":"a"}}',
        b'{"prompt":"cut off"}',
    ]
    path = tmp_path / "rows.jsonl.gz"
    path.write_bytes(gzip.compress(b"\n".join(lines))[:-4])

    found = run(tmp_path, server, str(path), "--json", "--max-row-mb", "1")

    assert found.code == 3
    assert orjson.loads(found.out) == {
        "rows": 10,
        "refused": 8,
        "prompt_tokens": len("one") + len("line\u2028separator".encode()),
        "longest_prompt": len("line\u2028separator".encode()),
    }
    named = [line.split(": ")[0] for line in found.err.splitlines()]
    assert named == [f"line {number}" for number in range(4, 12)]


@pytest.mark.parametrize(
    ("data", "said"), [(b"", "no rows"), (b"\n\n", "no rows"), (b"\xff\xfe{\0", "convert it")]
)
def test_a_file_that_is_no_input_is_refused_in_one_line(
    tmp_path: Path, server: str, data: bytes, said: str
) -> None:
    found = run(tmp_path, server, "-", stdin=data)

    assert found.code == 1
    assert said in found.err
    assert len(found.err.splitlines()) == 1


def test_standard_input_is_read(tmp_path: Path, server: str) -> None:
    found = run(tmp_path, server, "-", stdin=b'{"prompt":"a"}\n{"prompt":"b"}\n')

    assert found.code == 0, found.err
    assert "rows: 2" in found.out


@pytest.mark.parametrize(
    "num_rows",
    [20_000, pytest.param(1_000_000, marks=[pytest.mark.long, pytest.mark.timeout(1800)])],
)
def test_memory_does_not_grow_with_the_file(tmp_path: Path, server: str, num_rows: int) -> None:
    path = tmp_path / "rows.jsonl"
    with path.open("wb") as file:
        for number in range(num_rows):
            file.write(b'{"custom_id":"row number %d","prompt":"hello %d"}\n' % (number, number))

    found = run(tmp_path, server, str(path), "--json")

    assert found.code == 0, found.err[-500:]
    assert orjson.loads(found.out)["rows"] == num_rows
    assert found.max_rss_mb < 300
