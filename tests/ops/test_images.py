"""The Dockerfile, as far as it can be checked, and done, without Docker."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.ops.conftest import OPS, ROOT
from tests.ops.settings import check_api, check_command, check_worker
from tests.test_packaging import PACKAGES

TEXT = (OPS / "Dockerfile").read_text("utf-8")
TARGETS = ("api", "cpu", "cuda")
Instructions = list[tuple[str, str]]


def _instructions() -> Instructions:
    joined = re.sub(r"\\\n\s*", "", re.sub(r"^#.*\n", "", TEXT, flags=re.MULTILINE))
    lines = (line.partition(" ") for line in joined.splitlines() if line)
    return [(name, rest.strip()) for name, _, rest in lines]


def stages() -> dict[str, tuple[str, Instructions]]:
    """Return each stage's base and own instructions, by its name."""
    found: dict[str, tuple[str, Instructions]] = {}
    for name, rest in _instructions():
        if name == "FROM":
            base, _, stage = rest.partition(" AS ")
            found[stage] = base, []
            current = found[stage][1]
        elif found:
            current.append((name, rest))
    return found


def image(target: str) -> Instructions:
    """Return all instructions that make *target*, those of its bases first."""
    base, own = stages()[target]
    return (image(base) if base in stages() else []) + own


def last(target: str, instruction: str) -> str:
    return [rest for name, rest in image(target) if name == instruction][-1]


def variables(target: str) -> dict[str, str]:
    pairs = (pair for name, rest in image(target) if name == "ENV" for pair in rest.split())
    found = (pair.partition("=") for pair in pairs)
    return {name: value for name, _, value in found if name.startswith("HEADWATER_")}


@pytest.mark.parametrize("target", TARGETS)
def test_the_process_gets_the_signals_and_is_a_real_command(target: str) -> None:
    """In the shell's form SIGTERM would reach the shell, which passes nothing on."""
    entry, command = json.loads(last(target, "ENTRYPOINT")), json.loads(last(target, "CMD"))

    assert entry == ["headwater"]
    check_command(command)


@pytest.mark.parametrize("target", TARGETS)
def test_it_does_not_run_as_root(target: str) -> None:
    """And nothing is installed after root has been left."""
    names = [name for name, _ in image(target)]

    assert last(target, "USER").isdigit()
    assert last(target, "USER") in "".join(rest for name, rest in image(target) if name == "RUN")
    assert "RUN" not in names[names.index("USER") :]


@pytest.mark.parametrize("target", TARGETS)
def test_the_health_check_asks_the_port_that_is_listened_on(target: str) -> None:
    """It exits with 1 where /readyz answers 503."""
    options, _, command = last(target, "HEALTHCHECK").partition("CMD ")
    code = json.loads(command)
    name = "HEADWATER_API_PORT" if target == "api" else "HEADWATER_METRICS_PORT"
    port = variables(target)[name]

    assert "--interval=" in options
    assert code[:2] == ["python", "-c"]
    assert f"http://127.0.0.1:{port}/readyz" in code[2]
    assert last(target, "EXPOSE") == port


def test_the_variables_are_settings() -> None:
    """Compose gives the rest."""
    check_api(variables("api"))
    for target in ("cpu", "cuda"):
        check_worker(variables(target) | {"HEADWATER_ALIAS": "a", "HEADWATER_REDIS": "redis://x"})


def test_what_is_copied_exists_and_is_not_ignored() -> None:
    """Docker leaves out what the ignore file names, and says so only as a missing file."""
    ignored = (OPS / "Dockerfile.dockerignore").read_text().splitlines()
    copied = {
        source
        for base, own in stages().values()
        for name, rest in own
        if name == "COPY" and not rest.startswith("--from")
        for source in rest.split()[:-1]
    }

    assert set(PACKAGES) < copied
    assert "*" in ignored
    assert {f"!{source}" for source in copied} <= set(ignored)
    assert all((ROOT / source).exists() for source in copied)


def test_compose_builds_targets_that_exist() -> None:
    """Also that every worker's is not the HTTP server's."""
    services = yaml.safe_load((OPS / "compose.yaml").read_text())["services"]
    built = {name: each["build"]["target"] for name, each in services.items() if "build" in each}

    assert built == {"worker": "cpu", "worker-cuda": "cuda", "api": "api"}


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("target", ["api", "cpu"])
def test_an_image_made_by_hand_works(target: str, tmp_path: Path) -> None:
    """What the Dockerfile runs, in a new virtual environment for the image's own Python."""
    source, venv, wheels = tmp_path / "source", tmp_path / "venv", tmp_path / "wheels"
    for name in ("pyproject.toml", "README.md", "LICENSE", "constraints.txt"):
        source.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, source / name)
    for name in PACKAGES:
        shutil.copytree(ROOT / name, source / name)
    subprocess.run([sys.executable, "-m", "venv", venv], check=True)
    path = f"{venv / 'bin'}:{os.environ['PATH']}"
    quick = {"PYTHONPATH": "", "HEADWATER_CONNECT_TIMEOUT_S": "0.1"}
    env = {**os.environ, **quick, "PATH": path}
    for base in ("wheel", target):
        for name, line in stages()[base][1]:
            if name == "RUN" and line.startswith("pip "):
                here = line.replace("/wheels", str(wheels))
                here = here.replace("/constraints.txt", str(source / "constraints.txt"))
                subprocess.run(["sh", "-ec", here], cwd=source, env=env, check=True)

    def headwater(*words: str) -> "subprocess.CompletedProcess[str]":
        command = [str(venv / "bin/headwater"), *words]
        return subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True)

    assert headwater("--version").stdout.startswith("headwater ")
    assert headwater(*json.loads(last(target, "CMD")), "--help").returncode == 0
    # Everything that it imports is there: it fails for want of a server only.
    done = headwater(*json.loads(last(target, "CMD")), "--redis", "redis://127.0.0.1:1/0")
    assert "no " in done.stderr.splitlines()[-1]
    assert "127.0.0.1:1" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr
    if target == "cpu":
        done = headwater("doctor")
        assert "blas: mkl" in done.stdout, done.stdout + done.stderr
        assert done.returncode == 0
