"""Digests of weight files: by content, read once, and never one of a file that has changed."""

import os
import random
import shutil
from pathlib import Path

import pytest
from headwater.worker.engine import weight_digest
from headwater.worker.engine.weight_digest import digest_files


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Two files of several chunks each, the last one not full."""
    monkeypatch.setattr(weight_digest, "_CHUNK_BYTES", 1000)
    monkeypatch.setattr(weight_digest, "_READ_BYTES", 300)
    monkeypatch.setattr(weight_digest, "_SETTLED_S", -1.0)
    rng = random.Random(0)
    paths = [tmp_path / name for name in ("model-1.safetensors", "model-2.safetensors")]
    for path, size in zip(paths, (4321, 2000), strict=True):
        path.write_bytes(rng.randbytes(size))
    return paths


@pytest.fixture
def memory(tmp_path: Path) -> Path:
    return tmp_path / "digests"


@pytest.fixture
def num_read(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The files that were read, in order."""
    read: list[Path] = []
    hash_file = weight_digest._hash

    def noting(path: Path) -> str:
        read.append(path)
        return hash_file(path)

    monkeypatch.setattr(weight_digest, "_hash", noting)
    return read


def test_a_copy_has_the_same_digest_and_other_orders_have_others(
    files: list[Path], memory: Path, tmp_path: Path
) -> None:
    copies = [Path(shutil.copy(path, tmp_path / f"copy-{path.name}")) for path in files]

    assert digest_files(copies, memory) == digest_files(files, memory)
    assert digest_files(files[::-1], memory) != digest_files(files, memory)


def test_a_file_is_read_once(files: list[Path], memory: Path, num_read: list[Path]) -> None:
    first = digest_files(files, memory)

    assert digest_files(files, memory) == first
    assert num_read == files


def test_a_file_that_has_just_been_written_is_read_again(
    files: list[Path], memory: Path, num_read: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_digest, "_SETTLED_S", 3600.0)

    assert digest_files(files, memory) == digest_files(files, memory)
    assert len(num_read) == 4


@pytest.mark.parametrize("position", [0, 999, 1000, 2500, 4320])
def test_one_changed_bit_changes_the_digest_also_where_size_and_time_are_as_they_were(
    files: list[Path], memory: Path, position: int
) -> None:
    before = digest_files(files, memory)
    status = files[0].stat()
    content = bytearray(files[0].read_bytes())
    content[position] ^= 1
    files[0].write_bytes(content)
    os.utime(files[0], ns=(status.st_atime_ns, status.st_mtime_ns))

    assert files[0].stat().st_size == status.st_size
    assert digest_files(files, memory) != before


def test_another_file_under_the_same_name_is_read(
    files: list[Path], memory: Path, tmp_path: Path, num_read: list[Path]
) -> None:
    digest_files(files, memory)
    (tmp_path / "new").write_bytes(files[0].read_bytes()[::-1])
    (tmp_path / "new").replace(files[0])
    digest_files(files, memory)

    assert num_read == [*files, files[0]]


@pytest.mark.parametrize("content", [b"", b"{}", b"[]", b'{"is": 1, "digest": "zz"}', b"\xff"])
def test_a_damaged_note_is_as_none(
    files: list[Path], memory: Path, num_read: list[Path], content: bytes
) -> None:
    before = digest_files(files, memory)
    for note in memory.iterdir():
        note.write_bytes(content)

    assert digest_files(files, memory) == before
    assert len(num_read) == 4


def test_where_nothing_can_be_remembered_the_files_are_read_again(
    files: list[Path], memory: Path, num_read: list[Path]
) -> None:
    memory.write_text("a file is in the way")

    assert digest_files(files, memory) == digest_files(files, memory)
    assert len(num_read) == 4
