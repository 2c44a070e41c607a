"""API keys: who calls, known by the hash of the key, and what this caller may do."""

import hashlib
import secrets
from pathlib import Path
from typing import Final

import orjson
import structlog
from headwater.schemas import SchemaError

from ..errors import ProducerError
from ..openai_protocol.caller import Caller

log = structlog.get_logger()

_PREFIX: Final = "hw-"


class KeyFileError(ProducerError):
    """The key file can't be used."""


class KeyFile:
    """The callers in a file, read again when it changes: a removed key stops working at once."""

    def __init__(self, path: Path) -> None:
        """Read *path*; raises KeyFileError."""
        self._path = path
        self._version = self._stat()
        self._callers = self._read()

    def find(self, key: str) -> Caller | None:
        """Return whose key this is."""
        self._refresh()
        return self._callers.get(hash_of(key))

    def _refresh(self) -> None:
        try:
            version = self._stat()
            if version != self._version:
                self._callers = self._read()
                self._version = version
        except KeyFileError as error:
            # Whoever edits the file should not lock everybody out by a typing error.
            log.warning("key_file_not_read", error=str(error))

    def _stat(self) -> tuple[int, int, int]:
        try:
            found = self._path.stat()
        except OSError as error:
            raise KeyFileError(f"can't read the key file {self._path}: {error}") from error
        return found.st_mtime_ns, found.st_size, found.st_ino

    def _read(self) -> dict[str, Caller]:
        try:
            lines = self._path.read_text("utf-8").splitlines()
        except (OSError, UnicodeError) as error:
            raise KeyFileError(f"can't read the key file {self._path}: {error}") from error
        callers: dict[str, Caller] = {}
        for number, line in enumerate(lines, 1):
            if line.strip() and not line.startswith("#"):
                caller = self._parse(number, line)
                callers[caller.sha256] = caller
        return callers

    def _parse(self, number: int, line: str) -> Caller:
        try:
            return Caller.decode(line)
        except SchemaError as error:
            raise KeyFileError(f"{self._path} line {number}: {error}") from error


def hash_of(key: str) -> str:
    """Return the hash under which *key* stands in the file."""
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()


def new_key(name: str, **fields: object) -> tuple[str, str]:
    """Return a new key and its line for the file; raises SchemaError for bad *fields*."""
    key = _PREFIX + secrets.token_urlsafe(32)
    given = {field: value for field, value in fields.items() if value is not None}
    caller = Caller.parse({"name": name, "sha256": hash_of(key), **given})
    return key, orjson.dumps(caller.model_dump(mode="json", exclude_none=True)).decode()
