"""What a directory of prefixes holds, without a worker."""

import os
from pathlib import Path

from headwater.worker.disk_tier import DiskFolder, clear_directory, take_inventory

from .conftest import FINGERPRINT, chain, host_segment


def fill(folder: DiskFolder, ends: list[int]) -> list:
    entries = chain(ends)
    for number, entry in enumerate(entries):
        folder.write(entry, host_segment(entry))
        os.utime(folder.path / f"{entry.stem}.json", ns=(0, number * 10**9))
    return entries


def test_models_and_their_latest_prefixes_are_told_by_hash_and_length(
    tmp_path: Path, folder: DiskFolder
) -> None:
    entries = fill(folder, [8, 16, 40])
    other = DiskFolder(tmp_path, "sha256:other")
    other.entries()
    (single,) = chain([8])
    other.write(single, host_segment(single))
    first, second = take_inventory(tmp_path)

    assert (first.fingerprint, first.num_entries, first.num_tokens) == (FINGERPRINT, 3, 40)
    assert [(each.hash, each.num_tokens) for each in first.latest] == [
        (entry.key, entry.end) for entry in entries[::-1]
    ]
    assert first.latest[0].used_at == 2.0
    assert second.fingerprint == "sha256:other"
    size = sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file())
    assert first.nbytes + second.nbytes == size
    assert first.as_json()["latest"][0]["num_tokens"] == 40


def test_damaged_sidecars_are_counted_all_the_same(tmp_path: Path, folder: DiskFolder) -> None:
    (entry,) = fill(folder, [8])
    (folder.path / f"{entry.stem}.json").write_bytes(b"noise")
    (found,) = take_inventory(tmp_path)

    assert (found.fingerprint, found.num_entries) == (None, 1)


def test_clearing_removes_all_of_ours_and_nothing_else(tmp_path: Path, folder: DiskFolder) -> None:
    fill(folder, [8, 16])
    foreign = tmp_path / "llama" / "model.safetensors"
    foreign.parent.mkdir()
    foreign.write_bytes(b"weights")
    (held,) = take_inventory(tmp_path)

    assert clear_directory(tmp_path) == held.nbytes
    assert take_inventory(tmp_path) == []
    assert foreign.read_bytes() == b"weights"
    assert clear_directory(tmp_path) == 0
