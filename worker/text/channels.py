"""ChannelSplitter: tells reasoning and tool calls from content while the text arrives.

What comes out does not depend on how the text was cut into pieces. Everything that goes in comes
out in one channel, but for the markers (and a tool call's wrapping): nothing is stripped.
"""

from typing import Final

from ..channel_family import ChannelFamily, Mode, Tools
from .call_end import CallEndMatcher
from .segment import Segment
from .stops import StopMatcher, StopOutput
from .tool_calls import CallBook, JsonCall, WholeCalls

_MAX_PIECE_CHARS: Final = 4096
"""Every marker copies what stands behind it in its piece: longer ones are cut."""


class ChannelSplitter:
    """Follows a family's markers; holds only what may still become one.

    A tool call whose text can't be parsed is content, as it stands, markers included; so is one
    that was cut short before anything of it was told.
    """

    def __init__(
        self,
        family: ChannelFamily,
        *,
        start: Mode = Mode.CONTENT,
        tools: Tools = (),
        ends_after_call: bool = False,
    ) -> None:
        """*start* is where the prompt has left the text; *tools* are those on offer.

        With *ends_after_call* one call is told at most, and nothing behind it.
        """
        self._family = family
        self._tools = tools
        self._book = CallBook(is_single=ends_after_call)
        self._body: WholeCalls | JsonCall | None = None
        self._header: list[str] = []
        self._enter(start, "")

    @property
    def mode(self) -> Mode:
        """What the next character is, unless it belongs to a marker."""
        return self._mode

    @property
    def num_whole_calls(self) -> int:
        """Tool calls told so far that are whole."""
        return self._book.num_calls - len(self._book.incomplete)

    @property
    def incomplete_calls(self) -> tuple[int, ...]:
        """Indices of calls that were told in part, or whose arguments are no JSON object."""
        return tuple(self._book.incomplete)

    @property
    def is_over(self) -> bool:
        """Whether the one call that was asked for has ended: what follows is left out."""
        return self._book.is_full and self._body is None

    def push(self, text: str) -> list[Segment]:
        """Return the segments that *text* makes certain."""
        segments: list[Segment] = []
        waiting = _pieces(text)
        while waiting and not self.is_over:
            piece = waiting.pop()
            if self._matcher is None:
                self._take(piece, segments)
            else:
                waiting += _pieces(self._follow(self._matcher.push(piece), segments))
        return segments

    def flush(self, *, is_complete: bool) -> list[Segment]:
        """Return what is still held: the text has ended.

        With *is_complete* the model ended it, so that a call without an end marker may be whole.
        """
        segments: list[Segment] = []
        while isinstance(self._matcher, CallEndMatcher) and (output := self._matcher.settle()):
            rest = self._follow(output, segments)
            segments += self.push(rest)
        if self._matcher is not None and not self.is_over:
            self._take(self._matcher.flush(), segments)
        if self._body is not None:
            # A JSON object tells by itself whether it is complete.
            is_complete = is_complete or self._family.has_json_calls
            segments += self._body.close("", is_complete=is_complete)
        self._leave_header(segments)
        self._enter(Mode.CONTENT, "")
        return segments

    def _follow(self, output: StopOutput, segments: list[Segment]) -> str:
        """Take what a matcher has let out; return what stands behind the marker, if it met one."""
        self._take(output.text, segments)
        if output.matched is not None:
            self._leave(output.matched, segments)
            self._enter(self._family.transitions[self._mode][output.matched], output.matched)
        return output.rest

    def _take(self, text: str, segments: list[Segment]) -> None:
        if not text:
            return
        if self._body is not None:
            segments += self._body.push(text)
        elif self._mode.is_header:
            self._header.append(text)
        else:
            segments.append(Segment(text, is_reasoning=self._mode is Mode.REASONING))

    def _leave(self, marker: str, segments: list[Segment]) -> None:
        if self._body is not None:
            segments += self._body.close(marker, is_complete=True)
        self._leave_header(segments)

    def _leave_header(self, segments: list[Segment]) -> None:
        header = "".join(self._header)
        if header and not self._is_header(header):
            segments.append(Segment(header))
            self._header = []

    def _enter(self, mode: Mode, marker: str) -> None:
        opening = "".join(self._header) + marker
        self._header = [opening] if mode.is_header and self._is_header(opening) else []
        self._mode = mode
        self._matcher = self._start_matcher(tuple(self._family.transitions.get(mode, ())))
        self._body = self._open_calls(opening) if mode is Mode.TOOL_CALLS else None

    def _start_matcher(self, markers: tuple[str, ...]) -> StopMatcher | CallEndMatcher | None:
        if not markers:
            return None
        is_call = self._mode is Mode.TOOL_CALLS
        return CallEndMatcher(markers) if is_call else StopMatcher(markers)

    def _is_header(self, text: str) -> bool:
        return text.startswith(self._family.header_starts)

    def _open_calls(self, opening: str) -> WholeCalls | JsonCall:
        assert self._family.parse_calls is not None
        whole = WholeCalls(self._family.parse_calls, self._tools, self._book, opening)
        return JsonCall(whole, self._book) if self._family.has_json_calls else whole


def _pieces(text: str) -> list[str]:
    """Return *text* in short pieces, the first one last."""
    starts = range(0, len(text), _MAX_PIECE_CHARS)
    return [text[start : start + _MAX_PIECE_CHARS] for start in reversed(starts)]
