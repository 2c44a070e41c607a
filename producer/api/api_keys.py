"""API keys: who calls, known by the hash of the key, and what this caller may do."""

import hashlib
import secrets
from pathlib import Path
from typing import Annotated, Final

import orjson
import structlog
from headwater.schemas import Priority, SchemaError, WireModel
from headwater.schemas.keys import PRIORITIES
from pydantic import Field, StringConstraints

from ..errors import ProducerError

log = structlog.get_logger()

_PREFIX: Final = "hw-"

Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_-]+$", max_length=64)]
Hash = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]


class Caller(WireModel):
    """One line of the key file: a caller and its limits."""

    name: Name
    sha256: Hash
    """Of the key. A key is 256 random bits, so a slow hash would protect nothing more."""
    namespace: Name = "default"
    """Where its jobs, files and batches live, apart from other namespaces'."""
    priority: Priority = Priority.NORMAL
    """The class of its jobs; it may ask for a lower one."""
    requests_per_minute: int | None = Field(default=None, ge=1)
    max_queued: int | None = Field(default=None, ge=1)
    """Jobs of its that may wait in one queue."""

    @property
    def may_choose(self) -> bool:
        """Whether it may choose any namespace and priority: only where nobody needs a key."""
        return self == ANYONE

    def allows(self, priority: Priority) -> bool:
        """Whether it may submit jobs of this class."""
        return self.may_choose or PRIORITIES.index(priority) >= PRIORITIES.index(self.priority)


ANYONE: Final = Caller(name="anyone", sha256="0" * 64)
"""The caller of a server without a key file."""


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
