"""The demo, and that nothing of it stays behind."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import orjson
import psutil
import pytest
from headwater.worker.engine.demo_model import fetch_demo

from tests.real.conftest import ROOT

COMMAND = [sys.executable, "-m", "headwater.producer.cli", "demo", "--jobs", "3"]


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """An environment whose temporary files can be told from others'."""
    fetch_demo()
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    return os.environ | {"TMPDIR": str(temporary), "HEADWATER_STATE_DIR": str(tmp_path / "state")}


def test_the_demo_streams_an_answer_and_counts_what_was_reused(
    environment: dict[str, str],
) -> None:
    result = subprocess.run(
        [*COMMAND, "--json"], capture_output=True, check=True, cwd=ROOT, env=environment
    )
    report = orjson.loads(result.stdout)

    assert "Paris" in report["answer"]
    assert report["jobs"] == 3
    # Three prompts share some 170 tokens; about 20 are each one's own.
    assert report["prompt_tokens_computed"] < report["prompt_tokens"] / 2
    assert _left_behind(environment) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_demo_that_is_interrupted_leaves_nothing_behind(
    environment: dict[str, str], number: int
) -> None:
    demo = subprocess.Popen(
        COMMAND, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, cwd=ROOT, env=environment
    )
    assert demo.stdout is not None
    with demo.stdout:
        while b"up" not in demo.stdout.readline():
            pass
        started = psutil.Process(demo.pid).children(recursive=True)
        demo.send_signal(number)
        demo.stdout.read()

    assert demo.wait(60) != 0
    _, alive = psutil.wait_procs(started, timeout=30)
    assert started
    assert alive == []
    assert _left_behind(environment) == []


def _left_behind(environment: dict[str, str]) -> list[str]:
    """Return what lies in the temporary folder, but for MLX's own cache of compiled kernels."""
    return [path.name for path in Path(environment["TMPDIR"]).iterdir() if path.name != "mlx"]
