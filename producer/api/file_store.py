"""FileStore: uploaded and produced files in a directory, each with a note beside it."""

import os
import secrets
import time
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, Final

from headwater.schemas import SchemaError, WireModel

from ..openai_protocol.errors import ApiError

_CHUNK: Final = 1024 * 1024


class StoredFile(WireModel):
    """A file's note."""

    id: str
    bytes: int
    created_at: int
    """Unix seconds."""
    filename: str
    purpose: str
    namespace: str

    def shown(self) -> dict[str, object]:
        """Return OpenAI's file object."""
        fields = self.model_dump(mode="json", exclude={"namespace"})
        return {"object": "file", **fields, "status": "processed"}


class FileStore:
    """Files below one directory. A file exists once its note does; notes appear in one piece."""

    def __init__(
        self,
        directory: Path,
        retention_s: float | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """*retention_s* is what is told of the files' lives; who deletes them is another's work."""
        self._directory = directory
        self._retention_s = retention_s
        self._clock = clock
        directory.mkdir(parents=True, exist_ok=True)

    def add(self, source: BinaryIO, *, filename: str, purpose: str, namespace: str) -> StoredFile:
        """Copy *source* in and return its note."""
        file_id = f"file-{secrets.token_hex(16)}"
        with self._content(file_id).open("xb") as target:
            while chunk := source.read(_CHUNK):
                target.write(chunk)
            _to_disk(target)
        return self._note(file_id, filename, purpose, namespace)

    def adopt(self, path: Path, file_id: str, *, filename: str, namespace: str) -> bool:
        """Move the file at *path* in, unless it is empty, and return whether there is one.

        Repeated after a crash, it finishes what was begun.
        """
        if path.exists():
            if not path.stat().st_size:
                path.unlink()
                return False
            path.replace(self._content(file_id))
        if not self._content(file_id).exists():
            return False
        self._note(file_id, filename, "batch_output", namespace)
        return True

    def get(self, file_id: str, namespace: str | None) -> StoredFile:
        """Return a note; raises ApiError 404. *namespace* None sees all."""
        note = self._read(self._note_path(file_id)) if _is_id(file_id) else None
        if note is None or namespace not in (None, note.namespace):
            raise ApiError(404, f"no such file: {file_id!r}", code="file_not_found")
        return note

    def all(self, namespace: str | None) -> list[StoredFile]:
        """Return all notes, newest first."""
        notes = (self._read(path) for path in self._directory.glob("file-*.json"))
        seen = [note for note in notes if note and namespace in (None, note.namespace)]
        return sorted(seen, key=lambda note: (note.created_at, note.id), reverse=True)

    def shown(self, note: StoredFile) -> dict[str, object]:
        """Return OpenAI's file object, with the end of its life."""
        if self._retention_s is None:
            return note.shown()
        return {**note.shown(), "expires_at": int(note.created_at + self._retention_s)}

    def path(self, note: StoredFile) -> Path:
        """Return where the content lies."""
        return self._content(note.id)

    def delete(self, note: StoredFile) -> None:
        """Remove a file; its note goes first, so that none is left without content."""
        self._note_path(note.id).unlink(missing_ok=True)
        self._content(note.id).unlink(missing_ok=True)

    def delete_leftovers(self, before_s: float) -> int:
        """Remove what crashes left without a note before *before_s* (Unix); return how many."""
        found = [*self._directory.glob("file-*.data"), *self._directory.glob("file-*.tmp")]
        leftovers = [
            path
            for path in found
            if not path.with_suffix(".json").exists() and _changed_s(path) < before_s
        ]
        for path in leftovers:
            path.unlink(missing_ok=True)
        return len(leftovers)

    def _note(self, file_id: str, filename: str, purpose: str, namespace: str) -> StoredFile:
        note = StoredFile(
            id=file_id,
            bytes=self._content(file_id).stat().st_size,
            created_at=int(self._clock()),
            filename=filename,
            purpose=purpose,
            namespace=namespace,
        )
        write_whole(self._note_path(file_id), note.encode())
        return note

    def _read(self, path: Path) -> StoredFile | None:
        try:
            return StoredFile.decode(path.read_bytes())
        except (FileNotFoundError, SchemaError):
            return None  # deleted meanwhile, or not one of ours

    def _content(self, file_id: str) -> Path:
        return self._directory / f"{file_id}.data"

    def _note_path(self, file_id: str) -> Path:
        return self._directory / f"{file_id}.json"


def write_whole(path: Path, data: bytes) -> None:
    """Write *data* so that whoever reads *path*, also after a crash, sees all or nothing of it."""
    temporary = path.with_suffix(".tmp")
    with temporary.open("wb") as file:
        file.write(data)
        _to_disk(file)
    temporary.replace(path)


def _to_disk(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


def _changed_s(path: Path) -> float:
    """Return when a file was changed; one that is gone is as young as can be."""
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return float("inf")


def _is_id(value: str) -> bool:
    # It becomes a part of a path.
    return value.startswith("file-") and value.replace("-", "").replace("_", "").isalnum()
