"""The worker process: how it starts, how it ends, what it says about itself."""

import os
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from headwater.producer.client import Producer, new_job
from headwater.producer.embedded import EmbeddedServer
from headwater.producer.result import collect
from headwater.schemas import Finished, keys
from headwater.worker.streams import JobStreams

from tests.real.conftest import ROOT, WorkerProcess, start_worker


@pytest.fixture
def own_server() -> Iterator[EmbeddedServer]:
    with EmbeddedServer() as server:
        yield server


@pytest.fixture
def own_producer(own_server: EmbeddedServer) -> Iterator[Producer]:
    producer = Producer(own_server.url)
    yield producer
    producer.close()


def _submit_long(producer: Producer, max_tokens: int) -> str:
    job = new_job("demo", [1, 2, 3, 4], max_tokens=max_tokens, ignore_eos=True)
    return producer.submit(job)


def _wait_for_delta(producer: Producer, job_id: str) -> None:
    key = keys.stream_key(job_id)
    last = "0-0"
    while True:
        reply = producer.redis.xread({key: last}, block=4000)
        assert reply, "nothing is published"
        entries = reply[0][1]
        if any(fields[b"type"] == b"delta" for _, fields in entries):
            return
        last = entries[-1][0]


def _finish_elsewhere(producer: Producer, url: str, job_id: str, length: int) -> list[str]:
    """Let another worker finish the job; return the types of its stream's entries."""
    heir = start_worker(url, "--drain-s", "0")
    result = collect(producer.tail(job_id))
    assert heir.stop() == 0
    assert isinstance(result.end, Finished)
    assert len(result.choices[0].token_ids) == length
    return [entry.event.type for entry in JobStreams(producer.redis).read(job_id)]


def _undisturbed(producer: Producer, length: int) -> list[int]:
    """Return the tokens of the same prompt, run again without a stop."""
    again = _submit_long(producer, length)
    return list(collect(producer.tail(again)).choices[0].token_ids)


def test_sigterm_hands_back_and_another_worker_goes_on(
    own_server: EmbeddedServer, own_producer: Producer
) -> None:
    first = start_worker(own_server.url, "--drain-s", "0")
    job_id = _submit_long(own_producer, 60)
    _wait_for_delta(own_producer, job_id)

    assert first.stop(signal.SIGTERM) == 0
    types = _finish_elsewhere(own_producer, own_server.url, job_id, 60)

    assert types.count("released") == 1
    assert types.count("resumed") == 1
    assert types[-1] == "finished"


def test_a_killed_workers_job_goes_on_at_the_next_token(
    own_server: EmbeddedServer, own_producer: Producer
) -> None:
    first = start_worker(own_server.url, "--lease-s", "1")
    job_id = _submit_long(own_producer, 60)
    _wait_for_delta(own_producer, job_id)
    first.stop(signal.SIGKILL)

    heir = start_worker(own_server.url, "--lease-s", "1")
    result = collect(own_producer.tail(job_id))
    undisturbed = _undisturbed(own_producer, 60)

    assert heir.stop() == 0
    assert list(result.choices[0].token_ids) == undisturbed
    types = [entry.event.type for entry in JobStreams(own_producer.redis).read(job_id)]
    assert types.count("resumed") == 1
    assert "restarted" not in types


def test_sigterm_lets_running_jobs_finish(
    own_server: EmbeddedServer, own_producer: Producer
) -> None:
    worker = start_worker(own_server.url, "--drain-s", "60")
    job_id = _submit_long(own_producer, 20)
    _wait_for_delta(own_producer, job_id)

    assert worker.stop(signal.SIGTERM) == 0

    types = [entry.event.type for entry in JobStreams(own_producer.redis).read(job_id)]
    assert types[-1] == "finished"


BREAK_THE_ENGINE = """
from headwater.worker.engine import blas
blas.preload()
from headwater.worker.errors import EngineUnsound
from headwater.worker.loop import GenerationLoop

step, num_steps = GenerationLoop.step, 0

def break_after_some_steps(loop):
    global num_steps
    num_steps += 1
    if num_steps > 6:
        raise EngineUnsound("the device is gone")
    step(loop)

GenerationLoop.step = break_after_some_steps
"""


def test_a_worker_whose_engine_is_unsound_hands_back_and_leaves(
    own_server: EmbeddedServer, own_producer: Producer
) -> None:
    worker = start_worker(own_server.url, before=BREAK_THE_ENGINE)
    job_id = _submit_long(own_producer, 60)

    assert worker.process.wait(60) == 1
    worker.reader.join()
    assert any("the device is gone" in line for line in worker.log)
    types = _finish_elsewhere(own_producer, own_server.url, job_id, 60)
    assert types.count("released") == 1
    assert types[-1] == "finished"


def _get(port: int, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}") as reply:
            return reply.status, reply.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def test_metrics_and_health_are_served(own_server: EmbeddedServer, own_producer: Producer) -> None:
    worker = start_worker(own_server.url, "--metrics-port", "0")
    collect(own_producer.tail(_submit_long(own_producer, 3)))
    port = _metrics_port(worker)

    status, metrics = _get(port, "/metrics")
    assert status == 200
    assert 'headwater_jobs_total{end="finished"} 1.0' in metrics
    assert "headwater_generated_tokens_total 3.0" in metrics
    assert "headwater_queue_wait_seconds_count 1.0" in metrics
    assert 'headwater_attempts_total{kind="started"} 1.0' in metrics
    assert "headwater_ready 1.0" in metrics
    assert "headwater_publish_backlog_seconds 0.0" in metrics
    assert "headwater_publish_lag_seconds_count 0.0" not in metrics
    assert _get(port, "/healthz") == (200, "ok\n")
    assert _get(port, "/readyz") == (200, "ok\n")
    assert _get(port, "/nothing")[0] == 404
    assert worker.stop() == 0


def _metrics_port(worker: WorkerProcess) -> int:
    line = next(line for line in worker.log if '"event": "metrics"' in line)
    match = re.search(r'"port": (\d+)', line)
    assert match
    return int(match[1])


def _worker(*options: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "headwater.producer.cli", "worker", *options],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        timeout=120,
        env=os.environ | {"HEADWATER_CONNECT_TIMEOUT_S": "0.1"},
    )


def test_a_server_that_does_not_answer_is_one_line() -> None:
    result = _worker("--redis", "redis://:secret@127.0.0.1:1/0")

    assert result.returncode == 1
    assert "no usable answer from 127.0.0.1:1 for 0.1 s" in result.stderr.splitlines()[-1]
    assert "secret" not in result.stderr
    assert "Traceback" not in result.stderr


def test_a_model_without_weights_is_one_line(own_server: EmbeddedServer, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')

    result = _worker("--redis", own_server.url, "--model", str(tmp_path), "--alias", "x")

    assert result.returncode == 1
    assert "has no weights" in result.stderr.splitlines()[-1]
    assert "Traceback" not in result.stderr


def test_a_bad_setting_is_one_line(own_server: EmbeddedServer) -> None:
    result = _worker("--redis", own_server.url, "--max-batch", "0")

    assert result.returncode == 1
    assert "max_batch" in result.stderr.splitlines()[-1]
