"""WireModel: the immutable, closed base of everything that crosses Redis."""

from typing import Any, Self

import orjson
from pydantic import BaseModel, ConfigDict, ValidationError

from .errors import SchemaError

_SHOWN_VALUE_CHARS = 60


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


def describe(error: ValidationError) -> str:
    """Return one line that names each wrong field, why, and the value (shortened)."""
    return "; ".join(_describe_one(detail) for detail in error.errors(include_url=False))


def _describe_one(detail: Any) -> str:
    field = ".".join(str(part) for part in detail["loc"]) or "value"
    if detail["type"] == "extra_forbidden":
        return f"unknown field {field!r}"
    if detail["type"] == "missing":
        return f"{field}: required"
    if detail["type"] == "too_short":
        context = detail["ctx"]
        return (
            f"{field}: must hold at least {context['min_length']} (got {context['actual_length']})"
        )
    shown = repr(detail["input"])
    if len(shown) > _SHOWN_VALUE_CHARS:
        shown = shown[:_SHOWN_VALUE_CHARS] + "..."
    return f"{field}: {detail['msg']} (got {shown})"
