"""The grammar of a whole reply: reasoning where the model may reason, then what is asked for.

Built where a job is checked, and where it runs: only there the model's own markers are known.
Like grammar.py not imported by the package itself.
"""

import json
from typing import Any, Final, NamedTuple

from .grammar import GrammarError, combine, format_entry, json_entry
from .job import GenerationJob
from .response_format import JsonObjectFormat, JsonSchemaFormat
from .tool_choice import tool_name, tool_parameters

_BLANK_LINE: Final = r"/\n{0,2}/"
"""Models leave it behind their reasoning; before JSON and calls it changes nothing."""
_LINE_END: Final = r"/\n?/"


class Marker(NamedTuple):
    """A marker as an expression of a Lark grammar."""

    lark: str
    is_text: bool
    """Whether it is written in tokens that are text; others a text can't hold by accident."""

    @classmethod
    def of_text(cls, text: str) -> "Marker":
        """Return a marker that is text."""
        return cls(json.dumps(text), is_text=True)


class Markers(NamedTuple):
    """What stands around a part of a reply."""

    start: Marker
    end: Marker


class Layout(NamedTuple):
    """How a model marks what surrounds the enforced part of a reply."""

    reasoning: Markers | None = None
    """None where the model does not reason, or may not any more."""
    is_reasoning: bool = False
    """Whether the prompt has begun the reasoning."""
    calls: Markers | None = None
    """Around each tool call; None where calls are not enforced."""


TEXT_CALLS: Final = Layout(
    calls=Markers(Marker.of_text("<tool_call>"), Marker.of_text("</tool_call>"))
)
"""For who checks a job without knowing the model: the usual markers."""


def reply_grammar(job: GenerationJob, layout: Layout) -> str | None:
    """Return the grammar of *job*'s replies; None where they are free.

    Raises GrammarError for what can't be enforced, ValueError for what the library can't read.
    """
    if job.forced_tools:
        return _calls(job, layout)
    if job.response_format is None:
        return None
    entry = format_entry(job.response_format)
    if layout.reasoning is None:
        return combine(entry)
    is_json = isinstance(job.response_format, JsonSchemaFormat | JsonObjectFormat)
    rules = _thought(layout, _BLANK_LINE if is_json else '""')
    return combine(_lark(["start: thought @value", *rules]), value=entry)


def _calls(job: GenerationJob, layout: Layout) -> str:
    if layout.calls is None:
        raise GrammarError("the model does not write its tool calls as JSON between markers")
    entries = {}
    forms = []
    for number, tool in enumerate(job.forced_tools):
        name = tool_name(tool)
        entries[f"arguments{number}"] = _arguments(name, tool_parameters(tool))
        # Spaced as chat templates show it to the model.
        head = f'{{"name": {json.dumps(name, ensure_ascii=False)}, "arguments": '
        forms.append(f'{json.dumps(head)} @arguments{number} "}}"')
    start, end = layout.calls.start.lark, layout.calls.end.lark
    more = f" ({_LINE_END} call)*" if job.may_call_in_parallel else ""
    rules = [
        f"start: {'thought ' if layout.reasoning else ''}call{more}",
        f"call: {start} {_LINE_END} ({' | '.join(forms)}) {_LINE_END} {end}",
        *_thought(layout, _BLANK_LINE),
    ]
    return combine(_lark(rules), **entries)


def _arguments(name: str | None, parameters: Any) -> dict[str, Any]:
    if not isinstance(parameters, dict) or parameters.get("type", "object") != "object":
        raise GrammarError(f"the parameters of tool {name!r} must be the schema of an object")
    try:
        return json_entry({**parameters, "type": "object"})
    except GrammarError as error:
        raise GrammarError(f"the parameters of tool {name!r}: {error}") from error


def _thought(layout: Layout, behind: str) -> list[str]:
    """Return the rules of the reasoning with its markers and what may stand behind it."""
    if layout.reasoning is None:
        return []
    start, end = layout.reasoning
    whole = f"body {behind}" if end.is_text else f"body {end.lark} {behind}"
    if not layout.is_reasoning:
        whole = f"({start.lark} {whole})?"
    suffix = f"[suffix={end.lark}]" if end.is_text else ""
    return [f"thought: {whole}", f"body{suffix}: /(?s:.*)/"]


def _lark(rules: list[str]) -> dict[str, Any]:
    return {"lark_grammar": "\n".join(rules)}
