"""ResponseFormat: what an output has to look like, enforced token by token."""

from typing import Annotated, Any, Literal, TypeAlias

from pydantic import FailFast, Field, StringConstraints, field_validator

from . import limits
from .base import RequestModel, json_size


class JsonSchemaFormat(RequestModel):
    """A JSON value that the schema allows."""

    type: Literal["json_schema"] = "json_schema"
    json_schema: dict[str, Any]
    """The schema itself. Keywords that can't be enforced are refused, not ignored."""

    @field_validator("json_schema")
    @classmethod
    def _schema_is_small_json(cls, value: dict[str, Any]) -> dict[str, Any]:
        size = json_size(value)
        if size > limits.MAX_JSON_SCHEMA_BYTES:
            raise ValueError(f"is {size} bytes as JSON; at most {limits.MAX_JSON_SCHEMA_BYTES}")
        return value


class JsonObjectFormat(RequestModel):
    """Any JSON object."""

    type: Literal["json_object"] = "json_object"


class RegexFormat(RequestModel):
    """A text that the expression matches as a whole. Syntax: Rust's regex, without look-around."""

    type: Literal["regex"] = "regex"
    regex: str = Field(min_length=1, max_length=limits.MAX_REGEX_CHARS)


class ChoiceFormat(RequestModel):
    """One of these texts."""

    type: Literal["choice"] = "choice"
    choices: Annotated[tuple[Annotated[str, StringConstraints(min_length=1)], ...], FailFast()] = (
        Field(min_length=1, max_length=limits.MAX_FORMAT_CHOICES)
    )

    @field_validator("choices")
    @classmethod
    def _choices_are_bounded_together(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        num_chars = sum(map(len, value))
        if num_chars > limits.MAX_FORMAT_CHOICE_CHARS:
            raise ValueError(
                f"has {num_chars} characters together; at most {limits.MAX_FORMAT_CHOICE_CHARS}"
            )
        return value


ResponseFormat: TypeAlias = Annotated[
    JsonSchemaFormat | JsonObjectFormat | RegexFormat | ChoiceFormat,
    Field(discriminator="type"),
]
