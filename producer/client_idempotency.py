"""What a submit with an idempotency key leaves behind, and how the next one compares."""

import hashlib
from typing import NamedTuple, Self

import orjson
from headwater.schemas import GenerationJob, SchemaError

from .errors import IdempotencyConflict

_NOT_COMPARED = {"job_id", "tokenizer_fingerprint"}
"""Filled in by us, so two submits of one request may differ in them."""


class Record(NamedTuple):
    """The value under an idempotency key."""

    job_id: str
    payload: str
    """Digest of the request."""

    def encode(self) -> bytes:
        """Return the form that lies in Redis."""
        return orjson.dumps(self._asdict())

    @classmethod
    def parse(cls, data: bytes | None) -> Self | None:
        """Parse what encode() gave; None stays None. Raises SchemaError."""
        if data is None:
            return None
        try:
            return cls(**orjson.loads(data))
        except (orjson.JSONDecodeError, TypeError) as error:
            raise SchemaError(f"an idempotency record is damaged: {error}") from error

    def check(self, other: "Record", key: str) -> None:
        """Raise IdempotencyConflict unless *other* records the same request."""
        if other.payload != self.payload:
            raise IdempotencyConflict(
                f"idempotency key {key!r} belongs to job {self.job_id}, whose request differs"
            )


def payload_digest(job: GenerationJob) -> str:
    """Return a digest of the request as the caller wrote it (before a seed is filled in)."""
    fields = job.model_dump(mode="json", exclude=_NOT_COMPARED)
    canonical = orjson.dumps(fields, option=orjson.OPT_SORT_KEYS)
    return hashlib.sha256(canonical).hexdigest()
