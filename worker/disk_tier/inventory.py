"""What a directory of prefixes holds, for people: no worker and no model is needed."""

from pathlib import Path
from typing import Any, Final, NamedTuple

from .file_groups import FileGroup, file_groups
from .sidecar import BadEntry, Sidecar

_MOST_PREFIXES: Final = 20


class StoredPrefix(NamedTuple):
    """An entry: the prefix at whose end it lies, never its text or tokens."""

    hash: str
    num_tokens: int
    """Of the whole prefix."""
    nbytes: int
    used_at: float
    """Unix seconds."""


class ModelInventory(NamedTuple):
    """What is there of one model, or of a model with an adapter, in one version of mlx-lm."""

    folder: str
    fingerprint: str | None
    """None where no entry can be read."""
    num_entries: int
    num_tokens: int
    """What prefixes share counts once."""
    nbytes: int
    latest: list[StoredPrefix]
    """The most recently used."""

    def as_json(self) -> dict[str, Any]:
        """Return it as JSON values."""
        return self._asdict() | {"latest": [each._asdict() for each in self.latest]}


def take_inventory(directory: Path) -> list[ModelInventory]:
    """Return what *directory* holds, by model, the largest first."""
    by_model: dict[str, list[FileGroup]] = {}
    for group in file_groups(directory):
        by_model.setdefault(group.model, []).append(group)
    found = [_inventory(folder, groups) for folder, groups in by_model.items()]
    return sorted(found, key=lambda each: -each.nbytes)


def clear_directory(directory: Path) -> int:
    """Remove every prefix of every model; return the number of bytes. Other files stay.

    A worker that uses the directory goes on, and misses what is gone.
    """
    num_bytes = 0
    for group in file_groups(directory):
        group.remove()
        num_bytes += group.nbytes
    return num_bytes


def _inventory(folder: str, groups: list[FileGroup]) -> ModelInventory:
    entries = sorted((each for each in groups if each.has_sidecar), key=lambda each: -each.used_ns)
    stored = [_stored(entry) for entry in entries]
    return ModelInventory(
        folder,
        next(filter(None, map(_fingerprint, entries)), None),
        len(entries),
        sum(length for _, length in stored),
        sum(group.nbytes for group in groups),
        [prefix for prefix, _ in stored[:_MOST_PREFIXES]],
    )


def _stored(entry: FileGroup) -> tuple[StoredPrefix, int]:
    """Return an entry's prefix, and how many tokens of it the entry itself holds."""
    key, start, end = entry.stem.split("-")
    prefix = StoredPrefix(key, int(end), entry.nbytes, entry.used_ns / 1e9)
    return prefix, int(end) - int(start)


def _fingerprint(entry: FileGroup) -> str | None:
    try:
        return Sidecar.from_bytes(entry.paths[0].read_bytes()).fingerprint
    except (OSError, BadEntry):
        return None
