"""A model's fingerprint: what its keys and values depend on, without reading all of the weights."""

import hashlib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path

_SAMPLE_BYTES = 4096
_FORMAT = "headwater-model-1"


def model_fingerprint(directory: Path, parts: Iterable[str]) -> str:
    """Return what tells models apart whose keys and values must not be mixed.

    Of the weights it takes names, sizes, times of change, and samples of every tensor: a hash
    of all bytes would cost as much as loading them. So a copy may get another fingerprint, but a
    file that was written again does not keep its own. *parts* is what else matters
    (dtypes, tokenizer). Raises OSError.
    """
    digest = hashlib.sha256()
    for part in (_FORMAT, *parts):
        _add(digest, part.encode())
    _add(digest, (directory / "config.json").read_bytes())
    for path in sorted(directory.glob("model*.safetensors")):
        status = path.stat()
        _add(digest, f"{path.name} {status.st_size} {status.st_mtime_ns}".encode())
        for sample in _samples(path):
            _add(digest, sample)
    return "sha256:" + digest.hexdigest()


def _add(digest: "hashlib._Hash", part: bytes) -> None:
    # With its length, so that no two lists of parts run together into the same bytes.
    digest.update(len(part).to_bytes(8, "little") + part)


def _samples(path: Path) -> Iterator[bytes]:
    """Yield a safetensors file's header, and the start, middle and end of every tensor."""
    with path.open("rb") as file:
        header = file.read(int.from_bytes(file.read(8), "little"))
        yield header
        base = file.tell()
        for start, end in _ranges(header):
            last = max(start, end - _SAMPLE_BYTES)
            for position in sorted({start, (start + last) // 2, last}):
                file.seek(base + position)
                yield file.read(min(_SAMPLE_BYTES, end - position))


def _ranges(header: bytes) -> list[tuple[int, int]]:
    entries = json.loads(header)
    return sorted(
        tuple(entry["data_offsets"]) for name, entry in entries.items() if name != "__metadata__"
    )
