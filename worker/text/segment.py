"""Segment: a piece of one channel's text, not yet placed in its channel."""

from typing import NamedTuple


class CallHead(NamedTuple):
    """Which tool call a segment belongs to."""

    number: int
    """Of the calls of its choice, from 0."""
    name: str
    call_id: str | None = None


class Segment(NamedTuple):
    """Text that is certain, and what it is: content unless said otherwise."""

    text: str
    is_reasoning: bool = False
    call: CallHead | None = None
    """The tool call whose arguments the text is a part of."""
