"""ToolChoice: whether a reply may, must or must not call tools, as in chat requests."""

from typing import Annotated, Any, Literal, TypeAlias

from pydantic import Field, StringConstraints

from . import limits
from .base import WireModel

ToolName = Annotated[
    str, StringConstraints(min_length=1, max_length=limits.MAX_TOOL_NAME_CHARS, pattern=r"^\S+$")
]


class FunctionName(WireModel):
    """A tool by its name."""

    name: ToolName


class NamedTool(WireModel):
    """The one tool to call."""

    type: Literal["function"] = "function"
    function: FunctionName


ToolChoice: TypeAlias = Annotated[
    Literal["none", "auto", "required"] | NamedTool, Field(union_mode="left_to_right")
]
"""`none`: what looks like a call is content; `auto`: the model decides; `required`: one call at
least, of any tool; or the tool that is called, once."""


def tool_name(tool: dict[str, Any]) -> str | None:
    """Return the name in a tool's definition; None where it has none."""
    name = _function(tool).get("name")
    return name if isinstance(name, str) and name else None


def tool_parameters(tool: dict[str, Any]) -> Any:
    """Return the schema of a tool's arguments: any object where the definition has none."""
    parameters = _function(tool).get("parameters")
    return {"type": "object"} if parameters is None else parameters


def _function(tool: dict[str, Any]) -> dict[str, Any]:
    # OpenAI wraps the definition; some templates take it plain.
    function = tool.get("function", tool)
    return function if isinstance(function, dict) else {}
