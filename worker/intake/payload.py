"""A GenerationJob out of an RQ job's hash, by somebody who trusts nobody.

RQ itself would inflate the payload without a bound, import the function that it names, and fail
on any field that it cannot parse. We read the fields that we need, and never unpickle.
"""

import zlib
from datetime import UTC, datetime
from typing import Any, NamedTuple

import orjson
from headwater.schemas import GenerationJob, SchemaError, keys, limits
from headwater.schemas.base import shown

_LARGEST_RATIO = 1032
"""Deflate makes nothing smaller by more than this."""
_COUNTED_AT_ONCE = 2**20
_TOO_LARGE = f"the payload is cut short or inflates to more than {limits.MAX_PAYLOAD_BYTES} bytes"

FIELDS = ("data", "status", "enqueued_at")
"""Of the hash: what a claim looks at."""


class QueuedJob(NamedTuple):
    """A job that can be run."""

    job: GenerationJob
    enqueued_at_ms: int | None


def read_job(job_id: str, data: bytes | None, enqueued_at: bytes | None) -> QueuedJob:
    """Return the job in a hash's fields; raises SchemaError that says what is wrong with it."""
    if not data:
        raise SchemaError("the job has no payload")
    if len(data) > limits.MAX_COMPRESSED_PAYLOAD_BYTES:
        raise SchemaError(f"the payload has {len(data)} bytes: too many")
    try:
        job = GenerationJob.parse(_argument(_inflate(data)))
    except SchemaError:
        raise
    except Exception as error:
        # Whatever it is, it came of these bytes, and the next worker would die of them, too.
        raise SchemaError(f"the payload can't be read ({type(error).__name__})") from error
    if job.job_id != job_id:
        raise SchemaError(f"the payload is job {job.job_id!r}'s")
    return QueuedJob(job, _milliseconds(enqueued_at))


def _inflate(data: bytes) -> bytes:
    if len(data) * _LARGEST_RATIO > limits.MAX_PAYLOAD_BYTES:
        _check_inflated_size(data)
    inflater = zlib.decompressobj()
    try:
        raw = inflater.decompress(data, limits.MAX_PAYLOAD_BYTES)
    except zlib.error:
        return data  # RQ accepts a payload that is not compressed, too.
    if not inflater.eof:
        raise SchemaError(_TOO_LARGE)
    return raw


def _check_inflated_size(data: bytes) -> None:
    """Count before anything is kept: a process holds on to the memory that it once took."""
    inflater = zlib.decompressobj()
    size = 0
    try:
        while data and not inflater.eof:
            size += len(inflater.decompress(data, _COUNTED_AT_ONCE))
            if size > limits.MAX_PAYLOAD_BYTES:
                raise SchemaError(_TOO_LARGE)
            data = inflater.unconsumed_tail
    except zlib.error:
        return  # told when it is inflated


def _argument(raw: bytes) -> Any:
    """Return the one argument of the call that RQ's payload describes."""
    if raw.count(b"[") + raw.count(b"{") > limits.MAX_JSON_CONTAINERS:
        raise SchemaError(f"the payload has more than {limits.MAX_JSON_CONTAINERS} parts")
    try:
        call = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise SchemaError(f"the payload is not JSON ({error})") from error
    if not isinstance(call, list) or len(call) != 4:
        raise SchemaError("the payload is not [function, instance, arguments, keywords]")
    function, instance, arguments, keywords = call
    if function != keys.JOB_FUNCTION:
        raise SchemaError(f"the function is {shown(function)}, not {keys.JOB_FUNCTION!r}")
    if instance is not None or keywords or not isinstance(arguments, list) or len(arguments) != 1:
        raise SchemaError("the call must have one argument, a GenerationJob, and nothing else")
    return arguments[0]


def _milliseconds(enqueued_at: bytes | None) -> int | None:
    """Parse RQ's form of a time; a bad one costs a figure, not the job."""
    if not enqueued_at:
        return None
    try:
        moment = datetime.fromisoformat(enqueued_at.decode("ascii"))
    except ValueError:
        return None
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    return int(moment.timestamp() * 1000)
