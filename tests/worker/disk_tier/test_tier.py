"""The disk tier's threads: what is stored is found, what is bad is a miss, nothing raises."""

import errno
import os
import random
import threading
from pathlib import Path

import pytest
from headwater.worker.disk_tier import DiskTier, Entry
from structlog.testing import capture_logs

from .conftest import TOKENS, chain, host_segment, same


def store_all(tier: DiskTier, entries: list[Entry]) -> None:
    for entry in entries:
        assert tier.store(entry, host_segment(entry))
    tier.flush()


def load(tier: DiskTier, found: list[Entry], first: int = 0) -> list:
    return tier.load(found, first, lambda: None).result()


def test_another_tier_finds_the_deepest_prefix_of_what_was_stored(open_tier) -> None:
    entries = chain([8, 16, 40])
    store_all(open_tier(), entries)
    tier = open_tier()

    assert tier.find("default", TOKENS, 64) == entries
    assert tier.find("default", TOKENS, 39) == entries[:2]
    assert tier.find("default", [*TOKENS[:20], 7, *TOKENS[21:]], 64) == entries[:2]
    assert tier.find("default", TOKENS, 7) == []
    loaded = load(tier, entries, 1)
    assert [each.entry for each in loaded] == entries[1:]
    assert all(same(each.segment, host_segment(each.entry)) for each in loaded)


def test_what_was_stored_is_found_at_once(open_tier) -> None:
    tier = open_tier()
    (entry,) = chain([8])

    assert tier.missing("default", TOKENS, [8, 16]) == chain([8, 16])
    tier.store(entry, host_segment(entry))
    assert tier.missing("default", TOKENS, [8, 16]) == chain([8, 16])[1:]
    assert tier.find("default", TOKENS, 64) == [entry]


def test_no_namespace_and_no_other_model_finds_it(open_tier) -> None:
    store_all(open_tier(), chain([8], "tenant a"))

    assert open_tier().find("tenant a", TOKENS, 64) != []
    assert open_tier().find("tenant b", TOKENS, 64) == []
    assert open_tier("sha256:other").find("tenant a", TOKENS, 64) == []


def test_an_entry_without_those_before_it_is_not_found(open_tier) -> None:
    entries = chain([8, 16])
    store_all(open_tier(), entries[1:])

    assert open_tier().find("default", TOKENS, 64) == []


def test_a_damaged_entry_is_a_miss_with_one_warning_and_is_removed(
    open_tier, tmp_path: Path
) -> None:
    entries = chain([8, 16, 40])
    store_all(open_tier(), entries)
    for path in tmp_path.rglob(f"{entries[1].stem}.*.safetensors"):
        path.write_bytes(path.read_bytes()[:-1])
    tier = open_tier()
    with capture_logs() as logs:
        loaded = load(tier, entries)
        again = tier.find("default", TOKENS, 64)

    assert [each.entry for each in loaded] == entries[:1]
    assert again == entries[:1]
    assert [line["event"] for line in logs] == ["disk_entry_dropped"]
    assert list(tmp_path.rglob(f"{entries[1].stem}.*")) == []


def test_what_another_worker_removed_is_a_silent_miss(open_tier) -> None:
    entries = chain([8, 16])
    first, second = open_tier(), open_tier()
    store_all(first, entries)
    third = open_tier()
    second.clear()
    second.flush()
    with capture_logs() as logs:
        assert load(third, entries) == []

    assert third.find("default", TOKENS, 64) == []
    assert logs == []


def test_two_workers_write_and_read_one_directory_at_once(open_tier) -> None:
    tiers = [open_tier(max_bytes=20_000) for _ in range(2)]
    failures: list[BaseException] = []

    def work(tier: DiskTier, seed: int) -> None:
        rng = random.Random(seed)
        try:
            for _ in range(60):
                tokens = [rng.randrange(12), *range(63)]
                entries = chain([8, 16, 40], tokens=tokens)
                for entry in entries:
                    tier.store(entry, host_segment(entry))
                for each in load(tier, tier.find("default", tokens, 64)):
                    assert same(each.segment, host_segment(each.entry))
        except BaseException as error:  # told to the test's own thread
            failures.append(error)

    with capture_logs() as logs:
        threads = [
            threading.Thread(target=work, args=(tier, seed)) for seed, tier in enumerate(tiers)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for tier in tiers:
            tier.flush()

    assert failures == []
    assert logs == []
    assert not any(tier.is_off for tier in tiers)


def test_the_directory_is_kept_to_its_budget(open_tier, tmp_path: Path) -> None:
    tier = open_tier(max_bytes=30_000)
    for number in range(100):
        store_all(tier, chain([8, 64], tokens=[number, *range(64)]))

    size = sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file())
    assert size <= 31_000
    assert tier.find("default", [99, *range(64)], 64) != []
    assert tier.find("default", [0, *range(64)], 64) == []
    assert tier.num_entries < 200


def size_of(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())


@pytest.mark.parametrize("num_workers", [1, 2])
def test_a_worker_exceeds_the_budget_by_an_entry_at_most_and_others_by_half_of_it(
    open_tier, tmp_path: Path, num_workers: int
) -> None:
    """Another worker may not know of the writes since it last counted: half of the room then."""
    rng = random.Random(num_workers)
    max_bytes = 60_000
    tiers = [open_tier(max_bytes=max_bytes) for _ in range(num_workers)]
    largest = peak = 0
    for _ in range(120):
        entry = Entry(rng.randbytes(20).hex(), 0, rng.choice([1, 8, 64, 512]))
        tier = rng.choice(tiers)
        write = tier._folder.write

        def measured(entry, segment, write=write) -> int:
            nonlocal largest, peak
            written = write(entry, segment)
            largest, peak = max(largest, written), max(peak, size_of(tmp_path))
            return written

        tier._folder.write = measured
        store_all(tier, [entry])
        tier._folder.write = write
        if rng.random() < 0.1:
            tier.use([entry])

    unknown = (num_workers - 1) * max_bytes // 2
    assert peak <= max_bytes + unknown + num_workers * largest
    assert peak > 0.9 * max_bytes
    assert all(tier.nbytes <= max_bytes for tier in tiers)


@pytest.fixture
def no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every write fails when it is to reach the disk, as on a full one."""

    def fail(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)


def test_a_disk_that_takes_nothing_switches_the_tier_off_with_one_warning(
    open_tier, tmp_path: Path, no_room: None
) -> None:
    tier = open_tier()
    entries = chain([8, 16, 40])
    with capture_logs() as logs:
        tier.store(entries[0], host_segment(entries[0]))
        tier.store(entries[1], host_segment(entries[1]))
        tier.flush()

    assert tier.is_off
    assert not tier.store(entries[2], host_segment(entries[2]))
    assert tier.find("default", TOKENS, 64) == []
    assert [line["event"] for line in logs] == ["disk_tier_off"]
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_a_directory_that_cannot_be_made_switches_the_tier_off(tmp_path: Path, open_tier) -> None:
    first = open_tier()
    first.clear()
    first.flush()
    for path in tmp_path.iterdir():
        path.rmdir()
        path.write_text("a file is in the way")
    with capture_logs() as logs:
        tier = open_tier()

    assert tier.is_off
    assert [line["event"] for line in logs] == ["disk_tier_off"]
