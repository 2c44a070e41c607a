"""WireModel: the immutable, closed base of everything that crosses Redis."""

import reprlib
from typing import Any, Self

import orjson
from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from .errors import SchemaError

_SHOWN_VALUE_CHARS = 60
_SHOWN_DETAILS = 8
_REPR = reprlib.Repr()
# repr() itself would spell out megabytes, and fail on what is nested too deep for it.
_REPR.maxlevel = 4
_REPR.maxstring = _REPR.maxlong = _REPR.maxother = 2 * _SHOWN_VALUE_CHARS


class WireModel(BaseModel):
    """A frozen model that refuses unknown fields, with one byte form (orjson)."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    def encode(self) -> bytes:
        """Return the JSON form, without fields that hold None."""
        return orjson.dumps(self.model_dump(mode="json", exclude_none=True))

    @classmethod
    def decode(cls, data: bytes | str) -> Self:
        """Parse *data*; raises SchemaError that names what is wrong."""
        try:
            value = orjson.loads(data)
        except orjson.JSONDecodeError as error:
            raise SchemaError(f"not a {cls.__name__}: invalid JSON ({error})") from error
        return cls.parse(value)

    @classmethod
    def parse(cls, value: Any) -> Self:
        """Validate an already parsed *value*; raises SchemaError that names what is wrong."""
        try:
            return cls.model_validate(value)
        except ValidationError as error:
            raise SchemaError(f"not a {cls.__name__}: {describe(error)}") from error


class RequestModel(WireModel):
    """What callers write, who may be anybody: a wrong one costs no more to refuse than it did
    to read.

    pydantic makes an error of every unknown field, which takes far more than the field does.
    Sequences that may be long have to be declared with FailFast, for the same reason.
    """

    @model_validator(mode="before")
    @classmethod
    def _has_no_more_fields_than_there_are(cls, value: Any) -> Any:
        if isinstance(value, dict) and len(value) > len(cls.model_fields):
            unknown = next(name for name in value if name not in cls.model_fields)
            raise ValueError(f"has {len(value)} fields, of which {shown(unknown)} is unknown")
        return value


def json_size(value: Any) -> int:
    """Return the bytes that *value* takes as JSON; raises ValueError where it is none.

    It must leave room for what it is wrapped in on the wire: orjson writes a finite depth.
    """
    try:
        return len(orjson.dumps([[[[[[[[value]]]]]]]])) - len("[[[[[[[[]]]]]]]]")
    except orjson.JSONEncodeError as error:
        raise ValueError(f"must be JSON: {error}") from error


def describe(error: ValidationError) -> str:
    """Return one line that names the wrong fields, why, and the value, all shortened."""
    details = error.errors(include_url=False)
    lines = [_describe_one(detail) for detail in details[:_SHOWN_DETAILS]]
    if len(details) > _SHOWN_DETAILS:
        lines.append(f"and {len(details) - _SHOWN_DETAILS} more")
    return "; ".join(lines)


def shown(value: Any) -> str:
    """Return the beginning of a value's repr: a short line, whatever the value is."""
    text = _REPR.repr(value)
    return text if len(text) <= _SHOWN_VALUE_CHARS else text[:_SHOWN_VALUE_CHARS] + "..."


def _describe_one(detail: Any) -> str:
    field = ".".join(str(part)[:_SHOWN_VALUE_CHARS] for part in detail["loc"]) or "value"
    if detail["type"] == "extra_forbidden":
        return f"unknown field {field!r}"
    if detail["type"] == "missing":
        return f"{field}: required"
    if detail["type"] == "too_short":
        context = detail["ctx"]
        return (
            f"{field}: must hold at least {context['min_length']} (got {context['actual_length']})"
        )
    return f"{field}: {detail['msg']} (got {shown(detail['input'])})"
