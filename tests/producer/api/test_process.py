"""`headwater api` as a process: how it ends, and what it says when it can't listen."""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

import httpx2
import pytest
from headwater.producer.api.server import CannotListen, listen
from headwater.producer.client import Producer, SubmitSettings, new_job
from headwater.producer.embedded import EmbeddedServer

from .conftest import ROOT

StartProcess = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start_process(queue: EmbeddedServer, tmp_path: Path) -> Iterator[StartProcess]:
    """Start the command on the module's queue; it is gone when the test ends."""
    started: list[subprocess.Popen[str]] = []

    def start(*options: str) -> "subprocess.Popen[str]":
        command = [sys.executable, "-m", "headwater.producer.cli", "api", "--redis", queue.url]
        process = subprocess.Popen(
            [*command, "--data-dir", str(tmp_path), *options],
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env=os.environ | {"HEADWATER_API_LOG_JSON": "true"},
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def log_of(process: "subprocess.Popen[str]") -> IO[str]:
    assert process.stderr is not None
    return process.stderr


def port_of(process: "subprocess.Popen[str]") -> int:
    """Wait until it listens, and return where."""
    for line in log_of(process):
        if '"event": "listening"' in line:
            return int(json.loads(line)["port"])
    raise AssertionError("it never listened")


def test_sigterm_ends_it_with_exit_code_0_and_its_streams_with_it(
    start_process: StartProcess, queue: EmbeddedServer
) -> None:
    """A supervisor must be able to tell an orderly end from a crash."""
    with Producer(queue.url, SubmitSettings(check_model=False)) as producer:
        job_id = producer.submit(new_job("nobody", [1], max_tokens=1))
    process = start_process("--port", "0")
    url = f"http://127.0.0.1:{port_of(process)}"

    with httpx2.stream("GET", f"{url}/v1/jobs/{job_id}/events", timeout=60) as events:
        lines = events.iter_lines()
        assert next(lines).startswith("retry:")
        process.send_signal(signal.SIGTERM)
        list(lines)

    assert process.wait(60) == 0
    assert "Traceback" not in log_of(process).read()


def test_a_port_in_use_is_one_line(start_process: StartProcess) -> None:
    """A second server on a port says which one and what to do, and nothing else."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        process = start_process("--port", str(port))
        _, log = process.communicate(timeout=60)

    assert process.returncode == 1
    assert log == (
        f"headwater: can't listen on 127.0.0.1:{port} (Address already in use);"
        " choose another --host or --port\n"
    )


def test_an_address_that_is_not_ours_is_an_error() -> None:
    """An address of another machine fails like a port in use."""
    with pytest.raises(CannotListen, match=r"can't listen on 192\.0\.2\.1:0"):
        listen("192.0.2.1", 0)
