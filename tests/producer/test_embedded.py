import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest
from headwater.producer import embedded
from headwater.producer.embedded import EmbeddedServer, running_or_own, running_url
from headwater.producer.errors import ServerUnavailable
from redis import Redis


@pytest.fixture(autouse=True)
def state_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HEADWATER_STATE_DIR", str(tmp_path / "state"))
    return tmp_path / "state"


def _ping(url: str) -> bool:
    with Redis.from_url(url) as client:
        return bool(client.ping())


def test_other_commands_find_an_announced_server_as_long_as_it_runs() -> None:
    assert running_url() is None
    with EmbeddedServer(announce=True) as server:
        assert running_url() == server.url
        assert _ping(server.url)

    assert running_url() is None


def test_a_second_owner_uses_the_first_ones_server() -> None:
    with running_or_own() as first, running_or_own() as second:
        assert first == second


def test_a_note_that_a_killed_owner_left_is_no_server(state_directory: Path) -> None:
    state_directory.mkdir()
    (state_directory / "server.json").write_text('{"url": "redis://127.0.0.1:1/0"}')

    assert running_url() is None


@pytest.mark.parametrize("torn", ["", "{", "[]", '{"url": 5}'])
def test_a_torn_note_is_no_server(state_directory: Path, torn: str) -> None:
    state_directory.mkdir()
    (state_directory / "server.json").write_text(torn)

    assert running_url() is None


def test_data_outlives_the_server_where_a_directory_is_given(tmp_path: Path) -> None:
    with EmbeddedServer(data_dir=tmp_path / "data") as server, Redis.from_url(server.url) as redis:
        redis.set("kept", "yes")

    with EmbeddedServer(data_dir=tmp_path / "data") as server, Redis.from_url(server.url) as redis:
        assert redis.get("kept") == b"yes"


def test_it_never_evicts_a_key() -> None:
    with EmbeddedServer() as server, Redis.from_url(server.url) as redis:
        assert redis.config_get("maxmemory-policy") == {"maxmemory-policy": "noeviction"}


def test_a_port_in_use_is_one_clear_line() -> None:
    with EmbeddedServer() as server:
        port = int(server.url.rsplit(":", 1)[1].removesuffix("/0"))
        second = EmbeddedServer(port=port)
        with pytest.raises(ServerUnavailable, match="give --redis URL"):
            second.start()


def start_owner(code: str, *, start_new_session: bool = False) -> subprocess.Popen[str]:
    """Run *code*, which starts a server, in a process of its own."""
    return subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        start_new_session=start_new_session,
    )


def test_it_ends_with_its_owner_also_when_that_is_killed() -> None:
    code = (
        "import sys, time\n"
        "from headwater.producer.embedded import EmbeddedServer\n"
        "server = EmbeddedServer().start()\n"
        "print(server._server._process.pid, server._directory, flush=True)\n"
        "sys.stdin.read()\n"
    )
    owner = start_owner(code)
    assert owner.stdout is not None
    pid, directory = owner.stdout.readline().split()
    server = psutil.Process(int(pid))
    assert Path(directory).is_dir()

    os.kill(owner.pid, signal.SIGKILL)
    owner.wait()

    gone, alive = psutil.wait_procs([server], timeout=30)
    assert gone
    assert not alive
    # The watchdog shares the owner's output until it has removed the directory.
    owner.communicate()
    assert not Path(directory).exists()


def test_a_signal_to_its_owners_group_ends_the_owner_alone() -> None:
    """A shell sends `kill %1` to the whole job: a worker must still tell its last words."""
    code = (
        "import signal, sys\n"
        "from headwater.producer.embedded import EmbeddedServer\n"
        "asked = []\n"
        "for number in (signal.SIGTERM, signal.SIGINT):\n"
        "    signal.signal(number, lambda *args: asked.append(args[0]))\n"
        "with EmbeddedServer() as server:\n"
        "    print(server.url, flush=True)\n"
        "    sys.stdin.read()\n"
    )
    owner = start_owner(code, start_new_session=True)
    assert owner.stdout is not None
    url = owner.stdout.readline().strip()
    with Redis.from_url(url) as redis:
        server = psutil.Process(redis.info("server")["process_id"])
    group = os.getpgid(server.pid)

    os.killpg(owner.pid, signal.SIGTERM)
    os.killpg(owner.pid, signal.SIGINT)

    assert _ping(url)
    assert group != os.getpgid(owner.pid)
    owner.communicate("")
    psutil.wait_procs([server], timeout=30)
    assert not server.is_running()


def test_a_state_directory_that_cant_be_made_is_one_clear_line(state_directory: Path) -> None:
    """Users of services often have no home."""
    state_directory.write_text("a file")

    with pytest.raises(ServerUnavailable, match="set HEADWATER_STATE_DIR"), running_or_own():
        pass


def test_two_servers_never_write_the_same_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedded, "_STOP_TIMEOUT_S", 0)
    with EmbeddedServer(data_dir=tmp_path):
        second = EmbeddedServer(data_dir=tmp_path)
        with pytest.raises(ServerUnavailable, match="in use by another server"):
            second.start()


def test_owners_that_start_at_once_share_one_server() -> None:
    barrier = threading.Barrier(4, timeout=30)
    urls: list[str] = []

    def own() -> None:
        barrier.wait()
        with running_or_own() as url:
            assert _ping(url)
            urls.append(url)
            barrier.wait()

    threads = [threading.Thread(target=own) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert len(urls) == 4
    assert len(set(urls)) == 1


def test_a_server_whose_owner_is_gone_is_not_found(state_directory: Path) -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    with EmbeddedServer() as server:
        state_directory.mkdir()
        note = {"url": server.url, "owner_pid": gone.pid}
        (state_directory / "server.json").write_text(json.dumps(note))

        assert running_url() is None


def test_stopping_leaves_another_owners_note_alone(state_directory: Path) -> None:
    with EmbeddedServer(announce=True):
        note = state_directory / "server.json"
        note.write_text('{"url": "redis://127.0.0.1:1/0", "owner_pid": 1}')

    assert note.exists()


def test_servers_that_start_at_once_are_each_their_own() -> None:
    barrier = threading.Barrier(6, timeout=30)
    seen: list[tuple[int, int]] = []

    def own() -> None:
        server = EmbeddedServer()
        barrier.wait()
        with server, Redis.from_url(server.url) as redis:
            seen.append((server._server._process.pid, redis.info("server")["process_id"]))
            barrier.wait()

    threads = [threading.Thread(target=own) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert len(seen) == 6
    assert [answering for _, answering in seen] == [started for started, _ in seen]


def test_the_next_owner_goes_on_with_a_killed_ones_data() -> None:
    code = (
        "import sys\n"
        "from headwater.producer.embedded import running_or_own\n"
        "with running_or_own() as url:\n"
        "    print(url, flush=True)\n"
        "    sys.stdin.read()\n"
    )
    owner = start_owner(code)
    assert owner.stdout is not None
    first_url = owner.stdout.readline().strip()
    with Redis.from_url(first_url) as redis:
        redis.set("kept", "yes")

    os.kill(owner.pid, signal.SIGKILL)
    owner.wait()
    with running_or_own() as url, Redis.from_url(url) as redis:
        kept = redis.get("kept")
    owner.communicate()

    assert url != first_url
    assert kept == b"yes"
