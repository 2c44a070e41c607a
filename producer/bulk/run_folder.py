"""RunFolder: what a run is, noted next to its output, so that the same command goes on with it."""

import fcntl
import os
import shutil
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, Self

import orjson

from ..errors import ProducerError

_NOTE = "run.json"
_LOCK = ".lock"
SPOOLED = "input"
"""Standard input, kept for a run that goes on."""
_VERSION = 1


class RunRefused(ProducerError):
    """The files at hand belong to another run, or a run is in progress."""


class RunFolder:
    """`OUTPUT.headwater/`, locked while a run uses it; a context manager."""

    def __init__(self, output: Path, errors: Path, *, force: bool) -> None:
        """Lock the folder; with *force* what an earlier run left goes. Raises RunRefused."""
        self.path = output.with_name(f"{output.name}.headwater")
        self._files = (output, errors)
        self.path.mkdir(parents=True, exist_ok=True)
        self._lock = self._hold()
        if force:
            for file in self._files:
                file.unlink(missing_ok=True)
            self._remove(lambda child: child.name not in (_LOCK, SPOOLED))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if [child.name for child in self.path.iterdir()] == [_LOCK]:
            # Nothing came of it: the input was none, for one.
            shutil.rmtree(self.path)
        self._lock.close()

    def check(self, identity: dict[str, dict[str, Any]]) -> None:
        """Raise RunRefused where the files at hand are another run's.

        *identity* is what makes a run what it is, in named sections; not all must be known yet.
        """
        note = self._read()
        if note is not None:
            _compare(note["identity"], identity)
            return
        for file in self._files:
            if file.exists() and file.stat().st_size:
                raise RunRefused(f"{file} exists and is no run of ours: give --force to replace it")

    def enter(self, identity: dict[str, dict[str, Any]]) -> str:
        """Begin a run, or go on with the one that is here, and return its id; raises RunRefused."""
        self.check(identity)
        note = self._read()
        if note is not None:
            return str(note["run_id"])
        run_id = f"bulk-{uuid.uuid4().hex[:16]}"
        self._write({"version": _VERSION, "run_id": run_id, "identity": identity})
        return run_id

    def clear(self) -> None:
        """Remove what only a run in progress needs; the note and the workers' logs stay."""
        self._remove(lambda child: child.is_dir() or child.name == SPOOLED)

    def _hold(self) -> IO[str]:
        lock = (self.path / _LOCK).open("w")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.close()
            raise RunRefused(f"another process is working on {self._files[0]}") from None
        return lock

    def _remove(self, is_wanted: Callable[[Path], bool]) -> None:
        for child in filter(is_wanted, list(self.path.iterdir())):
            if child.is_dir():
                shutil.rmtree(child)
            else:
                child.unlink()

    def _read(self) -> dict[str, Any] | None:
        path = self.path / _NOTE
        if not path.exists():
            return None
        try:
            note: dict[str, Any] = orjson.loads(path.read_bytes())
            is_ours = note["version"] == _VERSION and isinstance(note["identity"], dict)
        except (orjson.JSONDecodeError, KeyError, TypeError):
            is_ours = False
        if not is_ours:
            raise RunRefused(f"{path} can't be read: give --force to begin anew")
        return note

    def _write(self, note: dict[str, Any]) -> None:
        new = self.path / f"{_NOTE}.new"
        with new.open("wb") as file:
            file.write(orjson.dumps(note, option=orjson.OPT_INDENT_2))
            file.flush()
            os.fsync(file.fileno())
        new.replace(self.path / _NOTE)
        # Without the note, what lies in the output after a power cut would be a stranger's.
        folder = os.open(self.path, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def _compare(known: dict[str, Any], given: dict[str, dict[str, Any]]) -> None:
    # As JSON has it: a tuple that was written comes back as a list.
    given = orjson.loads(orjson.dumps(given))
    for section, values in given.items():
        before = known.get(section, {})
        changed = [
            name for name in values.keys() | before.keys() if values.get(name) != before.get(name)
        ]
        if changed:
            name = min(changed)
            raise RunRefused(
                f"{section} changed since the output was begun ({name} was {before.get(name)!r}, is"
                f" {values.get(name)!r}): give the same, or --force to begin anew"
            )
