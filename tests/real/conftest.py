"""A real worker process on a real server, with the demo model."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from headwater.producer.client import Producer
from headwater.producer.embedded import EmbeddedServer
from headwater.schemas import keys
from headwater.worker.engine.demo_model import fetch_demo

ROOT = Path(__file__).parents[2]


@dataclass
class WorkerProcess:
    """A worker, and the end of its log."""

    process: "subprocess.Popen[str]"
    log: list[str]
    reader: threading.Thread

    def stop(self, number: int = signal.SIGTERM) -> int:
        """End it by a signal and return its exit code."""
        self.process.send_signal(number)
        code = self.process.wait(60)
        self.reader.join()
        return code


def start_worker(url: str, *options: str, before: str = "") -> WorkerProcess:
    """Start a worker with the demo model and wait until it serves.

    *before* is Python that runs in its process first.
    """
    code = f"{before}\nfrom headwater.producer.cli import main\nmain()"
    command = [sys.executable, "-c", code, "worker", "--redis", url]
    process = subprocess.Popen(
        [*command, "--model", "demo", "--alias", "demo", *options],
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=os.environ | {"HEADWATER_LOG_JSON": "true"},
    )
    log: list[str] = []
    ready = threading.Event()

    def read() -> None:
        assert process.stderr is not None
        with process.stderr:
            for line in process.stderr:
                log.append(line)
                if '"event": "ready"' in line:
                    ready.set()
        ready.set()

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    assert ready.wait(120)
    assert process.poll() is None, "".join(log)
    return WorkerProcess(process, log, reader)


@pytest.fixture(scope="module")
def server() -> Iterator[EmbeddedServer]:
    """An own server for the module."""
    with EmbeddedServer() as own:
        yield own


@pytest.fixture(scope="module")
def worker(server: EmbeddedServer) -> Iterator[WorkerProcess]:
    """A worker with the demo model; it must end well on SIGTERM."""
    fetch_demo()
    started = start_worker(server.url)
    yield started
    assert started.stop() == 0, "".join(started.log[-20:])
    with Producer(server.url).redis as redis:
        assert not list(redis.scan_iter(keys.worker_key("*")))


@pytest.fixture(scope="module")
def producer(server: EmbeddedServer, worker: WorkerProcess) -> Iterator[Producer]:
    """A producer for the worker."""
    mine = Producer(server.url)
    yield mine
    mine.close()
