"""LeadingReasoning: tells the reasoning before an enforced text from that text."""

from ..channel_family import Mode
from .channels import ChannelSplitter
from .reply_shape import ReplyShape
from .segment import Segment
from .stops import StopMatcher


class LeadingReasoning:
    """A splitter that looks for reasoning at the start only.

    What follows may hold any marker: in a JSON string it is text like any other. Calls that are
    enforced are told apart there; all else is content, or reasoning that was cut short.
    """

    def __init__(self, shape: ReplyShape, rest: ChannelSplitter | None) -> None:
        """*rest* takes what follows the reasoning, from its start; without it that is content."""
        assert shape.reasoning is not None
        self._start = shape.reasoning.start
        self._end = StopMatcher((shape.reasoning.end,))
        self._rest = rest
        self._held: str | None = None if shape.is_reasoning else ""
        """What may become the first marker."""
        self._mode = Mode.REASONING if shape.is_reasoning else Mode.CONTENT

    @property
    def mode(self) -> Mode:
        """What the next character is, unless it belongs to a marker."""
        is_behind = self._mode is Mode.CONTENT and self._rest is not None
        return self._rest.mode if is_behind and self._rest is not None else self._mode

    @property
    def num_whole_calls(self) -> int:
        """Tool calls told so far that are whole."""
        return self._rest.num_whole_calls if self._rest is not None else 0

    @property
    def incomplete_calls(self) -> tuple[int, ...]:
        """Indices of calls that were told in part, or whose arguments are no JSON object."""
        return self._rest.incomplete_calls if self._rest is not None else ()

    def push(self, text: str) -> list[Segment]:
        """Return the segments that *text* makes certain."""
        if self._held is not None:
            text = self._held + text
            if len(text) < len(self._start) and self._start.startswith(text):
                self._held = text
                return []
            self._held = None
            if text.startswith(self._start):
                self._mode = Mode.REASONING
                text = text[len(self._start) :]
        if self._mode is not Mode.REASONING:
            return self._pass_on(text)
        output = self._end.push(text)
        thought = [Segment(output.text, is_reasoning=True)] if output.text else []
        if output.matched is None:
            return thought
        self._mode = Mode.CONTENT
        return [*thought, *self._pass_on(output.rest)]

    def flush(self, *, is_complete: bool) -> list[Segment]:
        """Return what is still held: the text has ended."""
        segments = []
        if self._held:
            segments = self._pass_on(self._held)
        self._held = None
        if self._mode is Mode.REASONING and (rest := self._end.flush()):
            segments.append(Segment(rest, is_reasoning=True))
        if self._rest is not None:
            segments += self._rest.flush(is_complete=is_complete)
        return segments

    def _pass_on(self, text: str) -> list[Segment]:
        if not text:
            return []
        return self._rest.push(text) if self._rest is not None else [Segment(text)]
