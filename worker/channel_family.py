"""ChannelFamily: how a model marks its reasoning and its tool calls. Plain data, no MLX."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from typing import Any, NamedTuple, TypeAlias


class Mode(Enum):
    """What the text at a position is."""

    CONTENT = auto()
    REASONING = auto()
    TOOL_CALLS = auto()
    HEADER = auto()
    """Says what comes next, and belongs to the markers."""
    REASONING_HEADER = auto()
    """The rest of a header that has announced reasoning."""
    CONTENT_HEADER = auto()

    @property
    def is_header(self) -> bool:
        """Whether text of this mode belongs to the markers."""
        return self in (Mode.HEADER, Mode.REASONING_HEADER, Mode.CONTENT_HEADER)


class ParsedCall(NamedTuple):
    """One tool call of a model's text."""

    name: str
    arguments: str
    """A JSON object."""
    call_id: str | None = None


class UnparsableCalls(ValueError):
    """A text that should hold tool calls holds none."""


Tools: TypeAlias = Sequence[Mapping[str, Any]]
ParseCalls: TypeAlias = Callable[[str, Tools], list[ParsedCall]]
"""From the text between the markers, and the tools on offer; raises UnparsableCalls."""


class MarkerPair(NamedTuple):
    """What stands around a part of a text."""

    start: str
    end: str


@dataclass(frozen=True, slots=True, eq=False)
class ChannelFamily:
    """The markers between which a model reasons and calls tools."""

    transitions: Mapping[Mode, Mapping[str, Mode]]
    """For each mode, which marker leads to which mode."""
    parse_calls: ParseCalls | None = None
    """Needed where a marker leads to tool calls."""
    has_json_calls: bool = False
    """Whether a call is one object {"name": ..., "arguments": {...}}, whose arguments are told
    as they grow; others are told when they are complete."""
    header_starts: tuple[str, ...] = ()
    """What a header begins with; a text that turns out to be none is content."""
    markers: frozenset[str] = field(init=False)

    @property
    def reasoning_markers(self) -> MarkerPair | None:
        """What stands around reasoning, where that is one pair of markers."""
        return self._pair(Mode.REASONING)

    @property
    def json_call_markers(self) -> MarkerPair | None:
        """What stands around a tool call, where calls are JSON between two markers."""
        return self._pair(Mode.TOOL_CALLS) if self.has_json_calls else None

    def without_calls(self) -> "ChannelFamily":
        """Return the family with nothing that leads to tool calls."""
        kept = {
            mode: {marker: to for marker, to in edges.items() if to is not Mode.TOOL_CALLS}
            for mode, edges in self.transitions.items()
        }
        return replace(self, transitions=kept)

    def _pair(self, mode: Mode) -> MarkerPair | None:
        starts = [m for m, to in self.transitions.get(Mode.CONTENT, {}).items() if to is mode]
        ends = [m for m, to in self.transitions.get(mode, {}).items() if to is Mode.CONTENT]
        if len(starts) != 1 or len(ends) != 1:
            return None
        return MarkerPair(starts[0], ends[0])

    def __post_init__(self) -> None:
        markers = (marker for edges in self.transitions.values() for marker in edges)
        object.__setattr__(self, "markers", frozenset(markers))
