"""A batch whose HTTP server is killed in its midst, and killed again."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest
from headwater.producer.client import Producer
from headwater.producer.embedded import EmbeddedServer
from openai import OpenAI

from tests.faults.conftest import ALIAS, ROOT, FaultyWorker, StartWorker, check_no_lasting_key

NEW_TOKENS = 30
NUM_ROWS = 300
KILLS = (20, 120, 250)
"""The server is killed when so many rows are done."""
ENDED = ("completed", "failed", "expired", "cancelled")


class ApiProcess(FaultyWorker):
    """`headwater api` as a process of its own, and a client of it."""

    @property
    def client(self) -> OpenAI:
        """The official client, without retries of its own."""
        line = next(line for line in self.log if '"event": "listening"' in line)
        url = f"http://127.0.0.1:{json.loads(line)['port']}/v1"
        return OpenAI(base_url=url, api_key="none", max_retries=0)


class Apis:
    """Starts one server after the other over the same directory."""

    def __init__(self, redis_url: str, data_dir: Path) -> None:
        self._command = [
            *(sys.executable, "-m", "headwater.producer.cli", "api", "--redis", redis_url),
            *("--port", "0", "--data-dir", str(data_dir)),
        ]
        self._started: list[ApiProcess] = []

    def start(self) -> ApiProcess:
        env = {"HEADWATER_API_LOG_JSON": "true", "HEADWATER_API_BATCH_ROWS_IN_FLIGHT": "8"}
        process = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env=os.environ | env,
        )
        self._started.append(ApiProcess(process))
        self._started[-1].wait_for("listening")
        return self._started[-1]

    def close(self) -> None:
        for process in self._started:
            process.discard()


@pytest.fixture
def apis(server: EmbeddedServer, tmp_path: Path) -> Iterator[Apis]:
    starter = Apis(server.url, tmp_path)
    yield starter
    starter.close()


def _start_batch(client: OpenAI, names: list[str]) -> str:
    lines = [_row(name) for name in names]
    file = client.files.create(file=("in.jsonl", b"\n".join(lines)), purpose="batch")
    return client.batches.create(
        input_file_id=file.id, endpoint="/v1/completions", completion_window="24h"
    ).id


def _row(name: str) -> bytes:
    body = {
        "model": ALIAS,
        "prompt": name,
        "max_tokens": NEW_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
    }
    return orjson.dumps(
        {"custom_id": name, "method": "POST", "url": "/v1/completions", "body": body}
    )


def _generated_by(worker: FaultyWorker) -> int:
    """Sum the tokens that a worker which has ended generated."""
    line = next(line for line in worker.log if '"event": "stopped"' in line)
    return int(json.loads(line)["generated_tokens"])


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_batch_goes_on_after_its_server_was_killed_and_runs_no_row_twice(
    producer: Producer, start_worker: StartWorker, apis: Apis
) -> None:
    """Killed by SIGKILL once so many rows are done; the rows' jobs are found again."""
    worker = start_worker()
    names = [f"row {number}" for number in range(NUM_ROWS)]
    api = apis.start()
    batch_id = _start_batch(api.client, names)
    for num_done in KILLS:
        while api.client.batches.retrieve(batch_id).request_counts.completed < num_done:
            pass
        api.discard()
        api = apis.start()

    batch: Any = None
    while batch is None or batch.status not in ENDED:
        batch = api.client.batches.retrieve(batch_id)

    assert batch.status == "completed"
    counts = {"total": NUM_ROWS, "completed": NUM_ROWS, "failed": 0}
    assert batch.request_counts.model_dump() == counts
    rows = [
        json.loads(line) for line in api.client.files.content(batch.output_file_id).iter_lines()
    ]
    assert sorted(row["custom_id"] for row in rows) == sorted(names)
    jobs = list(producer.redis.scan_iter(f"rq:job:{batch_id}-*"))
    assert len(jobs) == NUM_ROWS
    assert worker.stop() == 0
    assert _generated_by(worker) == NUM_ROWS * NEW_TOKENS
    check_no_lasting_key(producer)
