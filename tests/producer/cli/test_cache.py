"""`headwater cache`, against reports that workers would write."""

import json
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from headwater.schemas import (
    CacheClear,
    CachedTokens,
    CacheReport,
    ClearOutcome,
    DiskCache,
    MemoryCache,
    TopPrefix,
    WorkerStatus,
    keys,
)
from redis import Redis

from tests.announced import announce_worker

REPORT = CacheReport(
    prompt_tokens=1000,
    cached=CachedTokens(memory=500, disk=200, in_flight=50),
    memory=MemoryCache(
        nbytes=3 * 2**20,
        pinned_nbytes=2**20,
        rows_nbytes=0,
        budget_nbytes=2**30,
        num_nodes=7,
        num_hits=9,
        num_evicted_nodes=0,
    ),
    disk=DiskCache(nbytes=5 * 2**20, budget_nbytes=10 * 2**30, num_entries=4),
    top=(
        TopPrefix(hash="ab" * 20, namespace="acme", num_tokens=250, num_hits=2, saved_tokens=500),
    ),
)


@pytest.fixture
def worker(redis: Redis) -> Callable[..., str]:
    """Let a worker appear, and tell *report* of its caches."""

    def appear(name: str = "w1", alias: str = "demo", report: bytes = REPORT.encode()) -> str:
        status = WorkerStatus(worker_id=name, alias=alias)
        announce_worker(redis, status)
        if report:
            redis.set(keys.cache_report_key(name), report, px=60_000)
        return name

    return appear


def test_caches_are_shown_in_tables_and_as_json(run, worker) -> None:
    worker()
    text = run("cache").out
    (shown,) = json.loads(run("cache", "--json").out)["workers"]

    for part in ("w1", "demo", "75%", "3.0 MiB", "1024.0 MiB", "5.0 MiB", "acme", "ab" * 8, "500"):
        assert part in text
    assert shown["worker_id"] == "w1"
    assert shown["report"]["hit_share"] == 0.75
    assert shown["report"]["memory"]["num_nodes"] == 7
    assert shown["report"]["top"][0]["saved_tokens"] == 500


def test_only_one_models_workers_are_shown(run, worker) -> None:
    worker("w1", "demo")
    worker("w2", "other")
    shown = json.loads(run("cache", "--model", "other", "--json").out)["workers"]

    assert [each["worker_id"] for each in shown] == ["w2"]


@pytest.mark.parametrize("report", [b"", b'{"of another": "version"}'])
def test_a_worker_of_another_version_gets_a_clear_line(
    run,
    worker,
    report: bytes,
) -> None:
    worker(report=report)
    cleared = run("cache", "clear")

    assert "tells nothing: another version" in run("cache").out
    assert json.loads(run("cache", "--json").out)["workers"][0]["report"] is None
    assert cleared.code == 1
    assert "w1: it tells nothing of its caches: another version" in cleared.out


def test_without_a_worker_there_is_nothing_to_show_and_nothing_to_clear(run) -> None:
    assert "no workers" in run("cache").out
    assert json.loads(run("cache", "--json").out) == {"workers": []}
    cleared = run("cache", "clear")
    assert cleared.code == 1
    assert cleared.err == (
        "headwater: no worker is running; --cache-dir DIR empties a directory without one\n"
    )
    assert "no worker serves 'x'" in run("cache", "clear", "--model", "x").err


def answer(redis: Redis, name: str) -> threading.Thread:
    """Play a worker that carries out the wish that its bell tells of."""
    pubsub = redis.pubsub(ignore_subscribe_messages=True)
    pubsub.subscribe(keys.bell_channel("demo"))
    pubsub.get_message(timeout=5)

    def work() -> None:
        assert pubsub.get_message(timeout=20)["data"] == keys.CACHE_BELL
        wish = CacheClear.decode(redis.get(keys.cache_clear_key(name)))
        outcome = ClearOutcome(
            clear_id=wish.clear_id,
            memory_freed_nbytes=2 * 2**20 if wish.memory else 0,
            disk_removed_entries=4 if wish.disk else 0,
        )
        done = REPORT.model_copy(update={"last_clear": outcome})
        redis.set(keys.cache_report_key(name), done.encode(), px=60_000)

    thread = threading.Thread(target=work)
    thread.start()
    return thread


@pytest.mark.parametrize(
    ("flags", "freed", "removed"),
    [((), 2 * 2**20, 4), (("--memory",), 2 * 2**20, 0), (("--disk",), 0, 4)],
)
def test_clearing_waits_for_the_workers_answer(
    run,
    worker,
    redis: Redis,
    flags: tuple[str, ...],
    freed: int,
    removed: int,
) -> None:
    worker()
    thread = answer(redis, "w1")
    cleared = run("cache", "clear", "--json", *flags)
    thread.join()

    assert cleared.code == 0
    assert json.loads(cleared.out)["workers"] == [
        {
            "worker_id": "w1",
            "alias": "demo",
            "state": "cleared",
            "memory_freed_nbytes": freed,
            "disk_removed_entries": removed,
        }
    ]
    assert redis.exists(keys.cache_clear_key("w1")) == 0


def test_a_worker_that_does_not_answer_keeps_the_wish(run, worker, redis: Redis) -> None:
    worker()
    cleared = run("cache", "clear", "--timeout-s", "0")

    assert cleared.code == 1
    assert "w1: no answer within 0 s; the wish stays for ten minutes" in cleared.out
    assert 0 < redis.ttl(keys.cache_clear_key("w1")) <= 600


def test_a_worker_that_ends_meanwhile_is_told(run, worker, redis: Redis) -> None:
    worker()
    wait = threading.Event()
    original = Redis.publish

    def end_instead(self, channel, message):
        redis.delete(keys.worker_key("w1"))
        wait.set()
        return original(self, channel, message)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Redis, "publish", end_instead)
        cleared = run("cache", "clear")

    assert wait.is_set()
    assert cleared.code == 1
    assert "w1: it has ended, and its memory with it" in cleared.out


def test_a_directory_is_shown_and_cleared_without_a_server(
    run,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from headwater.worker.disk_tier import DiskFolder

    from tests.worker.disk_tier.conftest import FINGERPRINT, chain, host_segment

    monkeypatch.setenv("HEADWATER_REDIS", "redis://localhost:1")
    folder = DiskFolder(tmp_path, FINGERPRINT)
    folder.entries()
    for entry in chain([8, 16]):
        folder.write(entry, host_segment(entry))
    shown = json.loads(run("cache", "--cache-dir", str(tmp_path), "--json").out)
    assert FINGERPRINT in run("cache", "--cache-dir", str(tmp_path)).out
    removed = run("cache", "clear", "--cache-dir", str(tmp_path), "--json")

    assert [(each["num_entries"], each["num_tokens"]) for each in shown["models"]] == [(2, 16)]
    assert json.loads(removed.out)["removed_nbytes"] == shown["models"][0]["nbytes"] > 0
    assert folder.entries() == []
    assert "no prefixes in" in run("cache", "--cache-dir", str(tmp_path)).out


def test_a_directory_that_is_not_there_is_an_error(run, tmp_path: Path) -> None:
    for command in (("cache",), ("cache", "clear")):
        outcome = run(*command, "--cache-dir", str(tmp_path / "nowhere"))
        assert outcome.code == 1
        assert "no directory" in outcome.err
