"""A worker that is started before its server, or while it goes away."""

import json
import socket
import subprocess
import sys
from pathlib import Path

import httpx2
from headwater.producer.client import Producer, SubmitSettings
from headwater.producer.embedded import EmbeddedServer, free_port
from headwater.schemas import Finished

from tests.faults.conftest import ROOT, StartWorker, job, result_of

STOP_AT_LOADED = """
from headwater.worker.service import Worker
stop_before(Worker, '_open', 'loaded')
"""


def test_a_worker_waits_for_a_server_that_comes_later(
    start_worker: StartWorker, tmp_path: Path
) -> None:
    port = free_port()
    worker = start_worker(url=f"redis://127.0.0.1:{port}/0", waits_for="waiting_for_redis")

    with EmbeddedServer(data_dir=tmp_path, port=port) as server:
        worker.wait_for("ready")
        with Producer(server.url, SubmitSettings(check_model=False)) as producer:
            assert isinstance(result_of(producer, producer.submit(job())).end, Finished)
        assert worker.stop() == 0


def test_a_server_that_goes_while_the_model_is_loaded_is_waited_for(
    start_worker: StartWorker, tmp_path: Path
) -> None:
    server = EmbeddedServer(data_dir=tmp_path).start()
    worker = start_worker(url=server.url, before=STOP_AT_LOADED, waits_for="starting")
    worker.wait_for_stage()
    port = int(server.url.rsplit(":", 1)[1].removesuffix("/0"))
    server.stop()
    worker.go_on()
    worker.wait_for("waiting_for_redis")

    with EmbeddedServer(data_dir=tmp_path, port=port):
        worker.wait_for("ready")
        assert worker.stop() == 0


def test_a_worker_that_waits_can_be_told_to_end(start_worker: StartWorker) -> None:
    url = f"redis://127.0.0.1:{free_port()}/0"
    worker = start_worker(url=url, waits_for="waiting_for_redis")

    assert worker.stop() == 0
    assert not worker.num_logged("ready")


def test_the_health_port_answers_while_the_model_is_loaded(start_worker: StartWorker) -> None:
    """A probe must be able to tell a slow start from a dead process."""
    worker = start_worker("--metrics-port", "0", before=STOP_AT_LOADED, waits_for="metrics")
    line = next(line for line in worker.log if '"event": "metrics"' in line)
    url = f"http://127.0.0.1:{json.loads(line)['port']}"
    worker.wait_for_stage()

    assert httpx2.get(f"{url}/healthz").status_code == 200
    assert httpx2.get(f"{url}/readyz").status_code == 503
    assert "starting" in httpx2.get(f"{url}/readyz").text
    assert httpx2.get(f"{url}/metrics").status_code == 200
    worker.go_on()
    worker.wait_for("ready")
    assert httpx2.get(f"{url}/readyz").text == "ok\n"
    assert worker.stop() == 0


def test_a_metrics_port_in_use_is_said_before_the_model_is_loaded(redis_url: str) -> None:
    """It costs neither minutes nor jobs: nothing was loaded, nothing was claimed."""
    command = [sys.executable, "-m", "headwater.producer.cli", "worker", "--redis", redis_url]
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        options = ["--metrics-port", port, "--model", "/nowhere", "--alias", "x"]
        done = subprocess.run(
            [*command, *options], capture_output=True, text=True, timeout=60, cwd=ROOT
        )

    assert done.returncode == 1
    assert f"can't listen on 127.0.0.1:{port}" in done.stderr.splitlines()[-1]
    assert "--metrics-port" in done.stderr.splitlines()[-1]
