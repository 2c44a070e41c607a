"""Entries in a directory: whole or not at all, whoever else writes there."""

import os
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from headwater.worker.disk_tier import DiskFolder
from headwater.worker.disk_tier.sidecar import BadEntry
from headwater.worker.host_segment import HostSegment

from .conftest import FINGERPRINT, chain, host_segment, same

WRITER = """
import sys
from pathlib import Path
from headwater.worker.disk_tier import DiskFolder
from tests.worker.disk_tier.conftest import FINGERPRINT, chain, host_segment
folder = DiskFolder(Path(sys.argv[1]), FINGERPRINT)
folder.entries()
print("ready", flush=True)
for number in range(int(sys.argv[2]), 100_000):
    for entry in chain([8, 16, 40], tokens=[number, *range(64)]):
        folder.write(entry, host_segment(entry))
        print(entry.stem, flush=True)
"""


def write_chain(folder: DiskFolder, ends: list[int]) -> list:
    entries = chain(ends)
    for entry in entries:
        folder.write(entry, host_segment(entry))
    return entries


def test_what_was_written_is_read_back(folder: DiskFolder) -> None:
    entries = write_chain(folder, [8, 16, 40])

    assert sorted(folder.entries()) == sorted(entries)
    for entry in entries:
        assert same(folder.read(entry), host_segment(entry))


def test_arrays_of_any_strides_are_read_back(folder: DiskFolder) -> None:
    (entry,) = chain([8])
    array = np.arange(2 * 8 * 3, dtype=np.float32).reshape(1, 8, 2, 3).transpose(0, 2, 1, 3)
    folder.write(entry, HostSegment(8, {"keys.0": array}, {}))

    assert np.array_equal(folder.read(entry).arrays["keys.0"], array)


def test_an_entry_that_is_there_is_not_written_again(folder: DiskFolder) -> None:
    (entry,) = chain([8])

    assert folder.write(entry, host_segment(entry)) > 0
    assert folder.write(entry, host_segment(entry)) == 0


def test_names_and_sidecars_tell_nothing_of_a_prompt(folder: DiskFolder) -> None:
    write_chain(folder, [8])

    for path in folder.path.iterdir():
        assert b"100" not in path.read_bytes().replace(b"0", b"")
    assert chain([8], "tenant a")[0].key != chain([8], "tenant b")[0].key


def test_the_least_recently_used_go_first_and_a_prefix_after_what_continues_it(
    folder: DiskFolder,
) -> None:
    old, new = chain([8, 16]), chain([8, 16], tokens=[7] * 16)
    for entry in (*new, *old):
        folder.write(entry, host_segment(entry))
    folder.touch(old)
    folder.touch(new)
    each = folder.shrink(10**9) // 4

    left = []
    for num_left in (3, 2, 1, 0):
        folder.shrink(int((num_left + 0.5) * each))
        left.append(sorted(folder.entries()))

    assert left == [sorted([old[0], *new]), sorted(new), [new[0]], []]
    assert list(folder.path.iterdir()) == []


def test_the_budget_counts_other_models_files_too(tmp_path: Path, folder: DiskFolder) -> None:
    other = DiskFolder(tmp_path, "sha256:other")
    other.entries()
    (entry,) = chain([8])
    other.write(entry, host_segment(entry))
    os.utime(next(other.path.glob("*.json")), ns=(0, 0))
    size = folder.shrink(10**9)
    write_chain(folder, [8])

    folder.shrink(int(1.5 * size))

    assert other.entries() == []
    assert folder.entries() == [entry]


def test_what_a_dead_writer_left_goes_when_it_is_old_and_not_before(folder: DiskFolder) -> None:
    (entry,) = write_chain(folder, [8])
    arrays = next(folder.path.glob("*.safetensors"))
    young, old = (folder.path / f"{'0' * 40}-0-{end}.x.safetensors.tmp" for end in (8, 9))
    for path in (young, old):
        path.write_bytes(arrays.read_bytes())
    os.utime(old, (0, 0))

    folder.shrink(10**9)

    assert young.exists()
    assert not old.exists()
    assert folder.entries() == [entry]


@pytest.mark.parametrize(
    "name",
    [
        "llama/model.safetensors",
        "llama/config.json",
        f"{'0' * 32}/model.safetensors",
        f"llama/{'0' * 40}-0-8.json",
    ],
)
def test_what_others_keep_in_the_directory_is_left_alone(
    tmp_path: Path, folder: DiskFolder, name: str
) -> None:
    """Also where it is old, and where the budget is exceeded many times."""
    foreign = tmp_path / name
    foreign.parent.mkdir()
    foreign.write_bytes(bytes(1000))
    os.utime(foreign, (0, 0))
    write_chain(folder, [8])

    assert folder.shrink(1) == 0
    assert foreign.exists()
    assert folder.entries() == []


MUTATIONS = ("truncate", "flip", "grow", "swap", "empty", "header", "sidecar", "format", "noise")


def mutate(rng: random.Random, folder: DiskFolder, kind: str) -> None:
    """Damage the files of one of two entries."""
    paths = sorted(folder.path.glob("*.safetensors"), key=lambda path: len(path.name))
    sidecars = sorted(folder.path.glob("*.json"))
    path = rng.choice([paths[0], sidecars[0]])
    content = bytearray(path.read_bytes())
    match kind:
        case "truncate":
            path.write_bytes(content[: rng.randrange(len(content))])
        case "flip":
            content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
            path.write_bytes(content)
        case "grow":
            path.write_bytes(content + rng.randbytes(rng.randrange(1, 99)))
        case "swap":
            others = paths if path in paths else sidecars
            one, other = others[0].read_bytes(), others[1].read_bytes()
            others[0].write_bytes(other)
            others[1].write_bytes(one)
        case "empty":
            path.write_bytes(b"")
        case "header":
            size = rng.choice([0, 1, 2**31, 2**63 - 1, 2**64 - 1])
            paths[0].write_bytes(size.to_bytes(8, "little") + bytes(content[8:]))
        case "sidecar":
            sidecars[0].write_bytes(rng.choice([b"{}", b"[]", b"null", b"\xff\xfe", b"x\n{}"]))
        case "format":
            text = sidecars[0].read_bytes().replace(b'"format":1', b'"format":0')
            sidecars[0].write_bytes(text)
        case "noise":
            path.write_bytes(rng.randbytes(len(content)))


def test_two_hundred_damaged_files_are_all_refused_and_none_is_read_wrongly(
    tmp_path: Path,
) -> None:
    rng = random.Random(5)
    refused = 0
    for number in range(200):
        folder = DiskFolder(tmp_path / str(number), FINGERPRINT)
        folder.entries()
        entries = [*chain([8]), *chain([16], tokens=[7] * 16)]
        for entry in entries:
            folder.write(entry, host_segment(entry))
        mutate(rng, folder, MUTATIONS[number % len(MUTATIONS)])
        for entry in entries:
            try:
                assert same(folder.read(entry), host_segment(entry))
            except BadEntry:
                refused += 1

    assert refused >= 200


def test_a_sidecar_with_a_right_checksum_of_wrong_things_is_refused(folder: DiskFolder) -> None:
    entries = write_chain(folder, [8, 16])
    described = [folder.path / f"{entry.stem}.json" for entry in entries]
    described[1].write_bytes(described[0].read_bytes())

    with pytest.raises(BadEntry, match="belongs to another name"):
        folder.read(entries[1])


def check_kills(tmp_path: Path, num_kills: int) -> None:
    """Kill a writer in the middle again and again; every entry that is there can be read."""
    folder = DiskFolder(tmp_path, FINGERPRINT)
    rng = random.Random(1)
    num_read = 0
    for number in range(num_kills):
        command = [sys.executable, "-c", WRITER, str(tmp_path), str(number * 1000)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
            for _ in range(rng.randrange(1, 40)):
                writer.stdout.readline()
            writer.kill()
        for entry in folder.entries():
            assert same(folder.read(entry), host_segment(entry))
            num_read += 1
    assert num_read > num_kills


def test_entries_survive_the_death_of_their_writer_whole_or_not_at_all(tmp_path: Path) -> None:
    check_kills(tmp_path, 5)


@pytest.mark.long
def test_entries_survive_fifty_deaths_of_their_writer(tmp_path: Path) -> None:
    check_kills(tmp_path, 50)
