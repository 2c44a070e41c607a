"""`headwater bulk` as a process of its own, killed and interrupted at random moments."""

import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
import psutil
import pytest
from headwater.producer.client import Producer
from redis import Redis

from .conftest import ALIAS, StartWorker

NEW_TOKENS = 16
_TIMEOUT_S = 120


@dataclass
class Bulk:
    """The command with its files."""

    folder: Path
    options: tuple[str, ...]
    reads_stdin: bool = False

    def __post_init__(self) -> None:
        self.source = self.folder / "rows.jsonl"
        self.output = self.folder / "out.jsonl"
        self.errors = self.folder / "out.jsonl.errors.jsonl"

    def write_rows(self, count: int) -> None:
        """Write rows, of which some share prefixes and one can't run."""
        rows = [
            {
                "prompt": f"{'shared by many ' * (index % 5)}row {index}",
                "max_tokens": NEW_TOKENS,
                "ignore_eos": True,
            }
            for index in range(count - 1)
        ]
        self.source.write_bytes(b"".join(orjson.dumps(row) + b"\n" for row in [*rows, {}]))

    def start(self, *more: str) -> "subprocess.Popen[bytes]":
        """Start it."""
        command = [sys.executable, "-m", "headwater.producer.cli", "bulk"]
        files = ["-" if self.reads_stdin else str(self.source), str(self.output)]
        with self.source.open("rb") as rows:
            return subprocess.Popen(
                [*command, *files, "--json", *self.options, *more],
                stdin=rows if self.reads_stdin else subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=os.environ | {"MKL_NUM_THREADS": "1"},
            )

    def run(self, *more: str) -> tuple[int, dict[str, Any], str]:
        """Run it to its end: exit code, summary, what it said."""
        process = self.start(*more)
        out, err = process.communicate(timeout=_TIMEOUT_S)
        return process.returncode, orjson.loads(out or b"{}"), err.decode()

    def num_done(self) -> int:
        """Rows in both files."""
        files = [file for file in (self.output, self.errors) if file.exists()]
        return sum(file.read_bytes().count(b"\n") for file in files)

    def kill_at(self, num_rows: int, number: int = signal.SIGKILL) -> "subprocess.Popen[bytes]":
        """Start it, and send a signal once so many rows are done."""
        process = self.start()
        while self.num_done() < num_rows and process.poll() is None:
            time.sleep(0.005)
        process.send_signal(number)
        return process

    def check_each_row_once(self, count: int) -> None:
        """Every line of the input stands in one of the files, once."""
        good = [orjson.loads(line) for line in self.output.read_bytes().splitlines()]
        bad = [orjson.loads(line) for line in self.errors.read_bytes().splitlines()]
        ids = Counter(row["custom_id"] for row in good + bad)
        assert ids == Counter(f"line-{line}" for line in range(1, count + 1))
        assert [row["line"] for row in bad] == [count]
        for row in good:
            usage = row["response"]["body"]["usage"]
            assert usage["completion_tokens"] == NEW_TOKENS


def kill_again_and_again(bulk: Bulk, num_rows: int, num_kills: int, seed: int) -> None:
    dice = random.Random(seed)
    for num_done in sorted(dice.sample(range(num_rows - 1), num_kills)):
        process = bulk.kill_at(num_done)
        process.communicate(timeout=_TIMEOUT_S)


def generated_by(log: Sequence[bytes]) -> int:
    """Sum what the workers that ended in good order generated, by their logs."""
    ends = [orjson.loads(line) for line in log if b'"stopped"' in line]
    return sum(end["generated_tokens"] for end in ends)


SIZES = [
    pytest.param(120, 2),
    pytest.param(2000, 20, marks=[pytest.mark.long, pytest.mark.timeout(1800)]),
]


@pytest.mark.parametrize(("num_rows", "num_kills"), SIZES)
def test_killed_with_a_worker_elsewhere_no_row_is_run_twice(
    start_worker: StartWorker, producer: Producer, tmp_path: Path, num_rows: int, num_kills: int
) -> None:
    worker = start_worker()
    url = producer.redis.connection_pool.connection_kwargs
    bulk = Bulk(tmp_path, ("--redis", f"redis://127.0.0.1:{url['port']}/0", "--model", ALIAS))
    bulk.write_rows(num_rows)

    kill_again_and_again(bulk, num_rows, num_kills, seed=1)
    code, summary, _ = bulk.run()

    assert (code, summary["done"]) == (3, num_rows)
    bulk.check_each_row_once(num_rows)
    assert worker.stop() == 0
    undisturbed = (num_rows - 1) * NEW_TOKENS
    generated = generated_by([line.encode() for line in worker.log])
    assert undisturbed <= generated <= 1.02 * undisturbed
    _check_what_is_left_expires(producer.redis)


@pytest.mark.parametrize(("num_rows", "num_kills"), SIZES)
def test_killed_all_in_one_little_is_run_twice(
    model: Path, tmp_path: Path, num_rows: int, num_kills: int
) -> None:
    bulk = Bulk(tmp_path, ("--model", str(model)))
    bulk.write_rows(num_rows)

    kill_again_and_again(bulk, num_rows, num_kills, seed=2)
    code, summary, said = bulk.run()

    assert (code, summary["done"]) == (3, num_rows), said
    bulk.check_each_row_once(num_rows)
    log = (tmp_path / "out.jsonl.headwater" / "worker-1.log").read_bytes()
    undisturbed = (num_rows - 1) * NEW_TOKENS
    assert undisturbed <= generated_by(log.splitlines()) <= 1.1 * undisturbed


def test_an_undisturbed_run_is_ordered_where_asked_and_a_second_one_does_nothing(
    model: Path, tmp_path: Path
) -> None:
    bulk = Bulk(tmp_path, ("--model", str(model), "--ordered", "--window", "16"))
    bulk.write_rows(100)

    code, summary, said = bulk.run()

    assert (code, summary["done"], summary["errors"]) == (3, 100, 1), said
    assert summary["generated_tokens"] == 99 * NEW_TOKENS
    assert summary["s_per_1000_rows"] > 0
    ids = [orjson.loads(line)["custom_id"] for line in bulk.output.read_bytes().splitlines()]
    assert ids == [f"line-{line}" for line in range(1, 100)]

    before = bulk.output.read_bytes()
    code, summary, _ = bulk.run()
    assert (code, summary["done_before"], summary["generated_tokens"]) == (3, 100, 0)
    assert bulk.output.read_bytes() == before

    code, _, said = bulk.run("--max-tokens", "3")
    assert code == 1
    assert "settings changed" in said
    assert "--force" in said


def test_a_file_may_hold_embeddings_beside_texts(model: Path, tmp_path: Path) -> None:
    bulk = Bulk(tmp_path, ("--model", str(model), "--max-tokens", "4"))
    rows = [
        {"custom_id": "text", "prompt": "a"},
        {"custom_id": "vectors", "url": "/v1/embeddings", "body": {"input": ["a", "b"]}},
    ]
    bulk.source.write_bytes(b"".join(orjson.dumps(row) + b"\n" for row in rows))

    code, summary, said = bulk.run()

    assert (code, summary["done"]) == (0, 2), said
    written = [orjson.loads(line) for line in bulk.output.read_bytes().splitlines()]
    bodies = {row["custom_id"]: row["response"]["body"] for row in written}
    first, second = (each["embedding"] for each in bodies["vectors"]["data"])
    assert len(first) == len(second) > 1
    assert first != second
    assert bodies["text"]["choices"][0]["text"]


def test_interrupted_once_it_finishes_what_runs_and_goes_on_later(
    model: Path, tmp_path: Path
) -> None:
    bulk = Bulk(tmp_path, ("--model", str(model), "--max-batch", "4"))
    bulk.write_rows(200)

    process = bulk.kill_at(10, signal.SIGINT)
    out, err = process.communicate(timeout=_TIMEOUT_S)

    assert process.returncode == 130
    assert b"finishing the rows that run" in err
    assert b"the same command goes on" in err
    stopped = orjson.loads(out)
    assert 10 <= stopped["done"] < 200
    assert stopped["done"] == bulk.num_done()

    code, summary, _ = bulk.run()
    assert (code, summary["done_before"]) == (3, stopped["done"])
    bulk.check_each_row_once(200)


def test_interrupted_twice_it_leaves_at_once_and_goes_on_later(model: Path, tmp_path: Path) -> None:
    bulk = Bulk(tmp_path, ("--model", str(model), "--max-batch", "4"))
    bulk.write_rows(200)

    process = bulk.kill_at(5, signal.SIGINT)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=_TIMEOUT_S)
    assert process.returncode == 130

    code, _, _ = bulk.run()
    assert code == 3
    bulk.check_each_row_once(200)


def test_a_worker_of_its_own_that_dies_is_replaced(model: Path, tmp_path: Path) -> None:
    bulk = Bulk(tmp_path, ("--model", str(model), "--max-batch", "4"))
    bulk.write_rows(120)

    process = bulk.start()
    while bulk.num_done() < 5 and process.poll() is None:
        time.sleep(0.005)
    for child in psutil.Process(process.pid).children():
        if "headwater.producer.owned_worker" in child.cmdline():
            child.kill()
    out, err = process.communicate(timeout=_TIMEOUT_S)

    assert process.returncode == 3, err
    assert orjson.loads(out)["done"] == 120
    bulk.check_each_row_once(120)


def test_why_a_model_does_not_load_is_the_last_line(tmp_path: Path) -> None:
    bulk = Bulk(tmp_path, ("--model", str(tmp_path / "none")))
    bulk.write_rows(2)

    code, _, said = bulk.run()

    assert code == 1
    *_, last = said.splitlines()
    assert "no model directory" in last
    assert "Traceback" not in said


def _check_what_is_left_expires(redis: Redis) -> None:
    # Killed between its file and the server, a run leaves what expires by itself.
    for pattern in ("headwater:events:*", "headwater:attempt:*", "rq:job:*"):
        assert all(redis.ttl(key) > 0 for key in redis.scan_iter(pattern))
