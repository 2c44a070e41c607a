"""Sidecar: what an entry on disk is, and the checksums that prove it."""

import hashlib
from typing import Any, Final

import orjson
from headwater.schemas import SchemaError
from headwater.schemas.base import WireModel
from pydantic import Field

FORMAT: Final = 1
"""Changes whenever older files can't be read any more."""


class BadEntry(Exception):
    """A file that is not what its name says: damaged, foreign, or of another format."""


class Sidecar(WireModel):
    """Stands beside an entry's arrays."""

    format: int = FORMAT
    fingerprint: str
    """Of the model."""
    key: str
    start: int = Field(ge=0)
    end: int = Field(ge=1)
    nbytes: int = Field(ge=0)
    """Of the file with the arrays."""
    digest: str
    """Its checksum."""
    details: dict[str, Any]
    """What the engine needs besides the arrays."""

    def to_bytes(self) -> bytes:
        """Return the file's content: the checksum of a line, and the line."""
        # Not encode(): details may hold nulls.
        body = orjson.dumps(self.model_dump(mode="json"))
        return checksum(body).encode() + b"\n" + body

    @classmethod
    def from_bytes(cls, content: bytes) -> "Sidecar":
        """Parse what to_bytes gave; raises BadEntry."""
        digest, _, body = content.partition(b"\n")
        if checksum(body).encode() != digest:
            raise BadEntry("its checksum is wrong")
        try:
            if orjson.loads(body).get("format") != FORMAT:
                raise BadEntry("it has another format")
            return cls.decode(body)
        except (SchemaError, orjson.JSONDecodeError, AttributeError) as error:
            raise BadEntry(f"it is no sidecar: {error}") from error


def checksum(data: bytes) -> str:
    """Return the checksum of *data*."""
    return hashlib.sha256(data).hexdigest()[:32]
