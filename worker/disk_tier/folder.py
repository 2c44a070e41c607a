"""DiskFolder: one model's entries in a directory that several workers may use at once."""

import os
import re
import secrets
import time
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
import safetensors.numpy
from safetensors import SafetensorError

from ..host_segment import HostSegment
from .file_groups import file_groups
from .sidecar import BadEntry, Sidecar, checksum

_NAME: Final = re.compile(r"([0-9a-f]{40})-(\d{1,9})-(\d{1,9})\.json")
_LEFTOVER_S: Final = 3600.0
"""Files without a sidecar that are older belong to nobody: their writer died."""
_TARGET: Final = 0.9
"""Share of the budget that is left after files have been removed."""


class Entry(NamedTuple):
    """Tokens [start, end) of the prefix that *key* names."""

    key: str
    start: int
    end: int

    @property
    def stem(self) -> str:
        """The common part of its files' names."""
        return f"{self.key}-{self.start}-{self.end}"


class DiskFolder:
    """Reads, writes and removes entries. Any method may raise OSError.

    A sidecar is written last and names its arrays' file by checksum, so that an entry is there
    whole or not at all, whoever else writes the same one, and whenever the writer dies.
    """

    def __init__(self, directory: Path, fingerprint: str) -> None:
        self._root = directory
        self._fingerprint = fingerprint
        self.path = directory / checksum(fingerprint.encode())

    def entries(self) -> list[Entry]:
        """Return what is there by name, unread."""
        self.path.mkdir(parents=True, exist_ok=True)
        found = (_NAME.fullmatch(path.name) for path in self.path.iterdir())
        return [Entry(each[1], int(each[2]), int(each[3])) for each in found if each]

    def read(self, entry: Entry) -> HostSegment:
        """Return an entry whose bytes have been checked.

        Raises FileNotFoundError when another worker has removed it, else BadEntry.
        """
        sidecar = Sidecar.from_bytes(self._sidecar_path(entry).read_bytes())
        found = (sidecar.fingerprint, sidecar.key, sidecar.start, sidecar.end)
        if found != (self._fingerprint, *entry):
            raise BadEntry("it belongs to another name")
        content = self._arrays_path(entry, sidecar.digest).read_bytes()
        if len(content) != sidecar.nbytes or checksum(content) != sidecar.digest:
            raise BadEntry("the checksum of its arrays is wrong")
        try:
            arrays = safetensors.numpy.load(content)
        except (SafetensorError, ValueError, KeyError) as error:
            raise BadEntry(f"its arrays can't be parsed: {error}") from error
        return HostSegment(entry.end - entry.start, arrays, sidecar.details)

    def write(self, entry: Entry, segment: HostSegment) -> int:
        """Write an entry unless it is there; return the bytes written."""
        if self._sidecar_path(entry).exists():
            return 0
        # safetensors writes an array's memory as it lies there, whatever its strides say.
        arrays = {name: np.ascontiguousarray(array) for name, array in segment.arrays.items()}
        content = safetensors.numpy.save(arrays)
        sidecar = Sidecar(
            fingerprint=self._fingerprint,
            key=entry.key,
            start=entry.start,
            end=entry.end,
            nbytes=len(content),
            digest=checksum(content),
            details=dict(segment.details),
        )
        _write_whole(self._arrays_path(entry, sidecar.digest), content)
        described = sidecar.to_bytes()
        _write_whole(self._sidecar_path(entry), described)
        return len(content) + len(described)

    def touch(self, chain: list[Entry]) -> None:
        """Note a use of adjacent entries from token 0: the first must be the last to go."""
        now = time.time_ns()
        for age, entry in enumerate(chain):
            try:
                os.utime(self._sidecar_path(entry), ns=(now, now - age))
            except FileNotFoundError:
                continue  # Another worker has removed it.

    def remove(self, entry: Entry) -> None:
        """Remove an entry, its sidecar first."""
        self._sidecar_path(entry).unlink(missing_ok=True)
        for path in self.path.glob(f"{entry.stem}.*.safetensors"):
            path.unlink(missing_ok=True)

    def clear(self) -> None:
        """Remove every entry of this model."""
        for entry in self.entries():
            self.remove(entry)

    def shrink(self, max_bytes: int) -> int:
        """Remove leftovers, and the least recently used entries of all models over *max_bytes*.

        Returns the bytes that are left.
        """
        files = sorted(file_groups(self._root), key=lambda group: group.used_ns)
        left = sum(group.nbytes for group in files)
        target = max_bytes * _TARGET if left > max_bytes else left
        now_ns = time.time_ns()
        for group in files:
            is_leftover = not group.has_sidecar
            if is_leftover and now_ns - group.used_ns < _LEFTOVER_S * 1e9:
                continue  # Perhaps about to get its sidecar.
            if is_leftover or left > target:
                group.remove()
                left -= group.nbytes
        return left

    def _sidecar_path(self, entry: Entry) -> Path:
        return self.path / f"{entry.stem}.json"

    def _arrays_path(self, entry: Entry, digest: str) -> Path:
        if not re.fullmatch("[0-9a-f]{32}", digest):
            raise BadEntry("its checksum is no checksum")
        return self.path / f"{entry.stem}.{digest}.safetensors"


def _write_whole(path: Path, content: bytes) -> None:
    """Write a file that appears at once, and whole also after a power cut."""
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        with temporary.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    _sync_directory(path.parent)


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
