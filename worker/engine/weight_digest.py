"""Digests of weight files: over all of their content, read once and remembered."""

import contextlib
import hashlib
import os
import secrets
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import orjson

_CHUNK_BYTES: Final = 32 * 2**20
"""Hashed on their own, so that several cores can share a file."""
_READ_BYTES: Final = 2**20
_SETTLED_S: Final = 2.0
"""A file that was changed later could change again within one tick of the file system's clock."""


def digest_files(paths: Iterable[Path], memory: Path) -> str:
    """Return a digest of the content of *paths*, in their order; names and places don't count.

    A file that is the one that it was (path, inode, size, times of change of content and of
    inode) is not read again: its digest is kept in the directory *memory*, where that can be
    written. Reading goes about as fast as SHA-256 on all cores. Raises OSError.
    """
    whole = hashlib.sha256()
    for path in paths:
        whole.update(bytes.fromhex(_remembered(path.resolve(), memory) or _read(path, memory)))
    return whole.hexdigest()


def _read(path: Path, memory: Path) -> str:
    path = path.resolve()
    before = _identity(path)
    digest = _hash(path)
    # Not if it is being written: the next start has to look again.
    is_settled = time.time() - path.stat().st_ctime > _SETTLED_S
    if is_settled and _identity(path) == before:
        _remember(path, memory, {"is": before, "digest": digest})
    return digest


def _identity(path: Path) -> list[str | int]:
    # The inode's time of change can't be set back, as the content's can.
    status = path.stat()
    times = (status.st_mtime_ns, status.st_ctime_ns)
    return [str(path), status.st_dev, status.st_ino, status.st_size, *times]


def _hash(path: Path) -> str:
    size = path.stat().st_size
    with ThreadPoolExecutor(os.cpu_count(), "weight-digest") as pool:
        starts = range(0, size, _CHUNK_BYTES)
        chunks = pool.map(lambda start: _hash_chunk(path, start), starts)
        whole = hashlib.sha256(size.to_bytes(8, "little"))
        for digest in chunks:
            whole.update(digest)
    return whole.hexdigest()


def _hash_chunk(path: Path, start: int) -> bytes:
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        file.seek(start)
        left = _CHUNK_BYTES
        while left and (block := file.read(min(left, _READ_BYTES))):
            digest.update(block)
            left -= len(block)
    return digest.digest()


def _note(path: Path, memory: Path) -> Path:
    return memory / f"{hashlib.sha256(os.fsencode(path)).hexdigest()[:32]}.json"


def _remembered(path: Path, memory: Path) -> str | None:
    try:
        noted = orjson.loads(_note(path, memory).read_bytes())
        if noted["is"] == _identity(path) and len(bytes.fromhex(noted["digest"])) == 32:
            return str(noted["digest"])
    except (OSError, KeyError, TypeError, ValueError):
        pass  # It was never read, or the note is damaged.
    return None


def _remember(path: Path, memory: Path, noted: dict[str, object]) -> None:
    # Where nothing can be written, the file is read again at the next start.
    with contextlib.suppress(OSError):
        memory.mkdir(parents=True, exist_ok=True)
        temporary = memory / f"{secrets.token_hex(8)}.tmp"
        temporary.write_bytes(orjson.dumps(noted))
        temporary.replace(_note(path, memory))
