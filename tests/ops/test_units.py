"""systemd's units and launchd's property list."""

import plistlib
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.ops.conftest import OPS
from tests.ops.settings import WORKER_SPARE_S, check_api, check_command, check_worker, parse_env

UNITS = {"worker": "headwater-worker@.service", "api": "headwater-api.service"}
PLIST = plistlib.loads((OPS / "launchd/headwater.worker.plist").read_bytes())


def read_unit(name: str) -> dict[str, list[str]]:
    """Return every directive's values; the sections do not share names."""
    found: dict[str, list[str]] = {}
    for line in (OPS / "systemd" / UNITS[name]).read_text("utf-8").splitlines():
        key, equals, value = line.partition("=")
        if equals and not line.startswith("#"):
            found.setdefault(key, []).append(value)
    return found


def environment(name: str) -> dict[str, str]:
    """Return the unit's own variables and those of the template of its file."""
    (pairs,) = read_unit(name)["Environment"]
    template = (OPS / f"systemd/{name}.env.template").read_text("utf-8")
    return parse_env("\n".join(pairs.split())) | parse_env(template)


@pytest.mark.parametrize("name", UNITS)
def test_a_unit_runs_a_real_command_and_begins_again_after_a_fault(name: str) -> None:
    """Exit code 0 is an end that was asked for; 2 is a command line that never works."""
    unit = read_unit(name)
    program, *words = unit["ExecStart"][0].split()

    assert Path(program).name == "headwater"
    check_command(words)
    assert unit["Restart"] == ["on-failure"]
    assert unit["RestartPreventExitStatus"] == ["2"]
    assert unit["KillSignal"] == ["SIGTERM"]
    assert unit["StartLimitIntervalSec"] == ["0"]


def test_systemd_waits_for_the_drain() -> None:
    """What still drains must not be killed."""
    worker, api = check_worker(environment("worker")), check_api(environment("api"))

    assert int(read_unit("worker")["TimeoutStopSec"][0]) > worker.drain_s + WORKER_SPARE_S
    assert int(read_unit("api")["TimeoutStopSec"][0]) > api.drain_s


@pytest.mark.parametrize("name", UNITS)
def test_a_units_files_are_those_of_its_comment_and_templates(name: str) -> None:
    """The paths that an administrator reads and those that the unit reads are the same."""
    unit = read_unit(name)
    (file,) = unit["EnvironmentFile"]
    template = (OPS / f"systemd/{name}.env.template").read_text("utf-8")

    assert file.replace("%i", "NAME") in template
    assert ("CacheDirectory" if name == "worker" else "StateDirectory") in unit


@pytest.mark.parametrize("name", UNITS)
def test_a_unit_may_do_little(name: str) -> None:
    """No rights, no devices, nothing to write but its own directory."""
    unit = read_unit(name)

    for directive in ("NoNewPrivileges", "PrivateTmp", "PrivateDevices", "RestrictNamespaces"):
        assert unit[directive] == ["yes"]
    assert unit["ProtectSystem"] == ["strict"]
    assert unit["CapabilityBoundingSet"] == [""]
    assert unit["User"] == ["headwater"]


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd-analyze here")
@pytest.mark.parametrize("name", UNITS)
def test_systemd_finds_nothing_wrong(name: str, tmp_path: Path) -> None:
    """The unit with a program that exists here, as systemd itself reads it."""
    unit = tmp_path / UNITS[name].replace("@", "@demo")
    text = (OPS / "systemd" / UNITS[name]).read_text("utf-8")
    unit.write_text(text.replace("/opt/headwater/bin/headwater", "/bin/true"))

    done = subprocess.run(
        ["systemd-analyze", "verify", unit], capture_output=True, text=True, check=False
    )

    assert done.returncode == 0, done.stderr
    assert unit.name not in done.stderr


def test_launchd_runs_a_real_command_and_begins_again_after_a_fault() -> None:
    """With a pause, and only where the end was none that was asked for."""
    program, *words = PLIST["ProgramArguments"]

    assert Path(program).name == "headwater"
    check_command(words)
    assert PLIST["KeepAlive"] == {"SuccessfulExit": False}
    assert PLIST["ThrottleInterval"] >= 10
    assert PLIST["RunAtLoad"] is True


def test_launchd_waits_for_the_drain() -> None:
    """Its own default is 20 seconds."""
    settings = check_worker(PLIST["EnvironmentVariables"])

    assert PLIST["ExitTimeOut"] > settings.drain_s + WORKER_SPARE_S
