"""The text between a tool call's markers: told when it is complete, or as it grows."""

import json
import re
from typing import Final

from ..channel_family import ParseCalls, ParsedCall, Tools, UnparsableCalls
from .segment import CallHead, Segment

_MAX_HEAD_CHARS: Final = 2048
"""A call that has not named its tool by then is told when it is complete."""

_HEAD: Final = re.compile(
    r"""\s* \{ \s* "name" \s* : \s* ("(?:[^"\\]|\\.)*") \s* , \s*
        "(?:arguments|parameters)" \s* : \s* (?=\{)""",
    re.VERBOSE | re.DOTALL,
)
_STRUCTURE: Final = re.compile(r'["\\{}]')


class CallBook:
    """Which tool calls of a choice were told."""

    def __init__(self, *, is_single: bool = False) -> None:
        """With *is_single* one call is told at most."""
        self._is_single = is_single
        self.num_calls = 0
        self.incomplete: list[int] = []
        """Indices of calls that were cut short, or whose arguments are no JSON object."""

    @property
    def is_full(self) -> bool:
        """Whether no further call is to be told."""
        return self._is_single and self.num_calls > 0

    def open(self, name: str, call_id: str | None = None) -> CallHead:
        """Return the head of the next call."""
        head = CallHead(self.num_calls, name, call_id)
        self.num_calls += 1
        return head


class WholeCalls:
    """Collects the text and tells its calls at the end, or the text itself as content."""

    def __init__(self, parse: ParseCalls, tools: Tools, book: CallBook, opening: str) -> None:
        """*opening* is the marker that led here."""
        self._parse = parse
        self._tools = tools
        self._book = book
        self._opening = opening
        self._pieces: list[str] = []

    def push(self, text: str) -> list[Segment]:
        """Take more of the text."""
        self._pieces.append(text)
        return []

    def close(self, marker: str, *, is_complete: bool) -> list[Segment]:
        """Return what came of it; *marker* ended it, if one did."""
        text = "".join(self._pieces)
        calls = self._parsed(text) if is_complete else []
        if not calls:
            return [Segment(self._opening + text + marker)]
        return [
            Segment(call.arguments, call=self._book.open(call.name, call.call_id))
            for call in calls
            if not self._book.is_full
        ]

    def _parsed(self, text: str) -> list[ParsedCall]:
        try:
            return self._parse(text, self._tools)
        except UnparsableCalls:
            return []


class JsonCall:
    """One object with name and arguments; the arguments are told as they grow.

    What does not begin with the tool's name goes the way of WholeCalls. Behind the arguments
    nothing but the object's end is expected; anything else there is content.
    """

    def __init__(self, whole: WholeCalls, book: CallBook) -> None:
        self._whole = whole
        self._book = book
        self._text = ""
        """What came before the arguments."""
        self._call: CallHead | None = None
        self._arguments: list[str] = []
        self._scanner = _ObjectScanner()
        self._rest: list[str] = []

    def push(self, text: str) -> list[Segment]:
        """Take more of the text; return the arguments in it, once the tool is named."""
        if self._call is None:
            if len(self._text) >= _MAX_HEAD_CHARS:
                return self._whole.push(text)
            self._text += text
            match = _HEAD.match(self._text)
            if match is None or match.end() >= _MAX_HEAD_CHARS:
                return self._hold_head()
            name = _string(match[1])
            if name is None:
                return self._hold_head()
            self._call = self._book.open(name)
            text = self._text[match.end() :]
        return self._grow(text)

    def _hold_head(self) -> list[Segment]:
        if len(self._text) >= _MAX_HEAD_CHARS:
            self._whole.push(self._text)
        return []

    def close(self, marker: str, *, is_complete: bool) -> list[Segment]:
        """Return what is left to tell."""
        if self._call is None:
            if len(self._text) < _MAX_HEAD_CHARS:
                self._whole.push(self._text)
            return self._whole.close(marker, is_complete=is_complete)
        if not _is_object("".join(self._arguments)):
            self._book.incomplete.append(self._call.number)
        rest = "".join(self._rest)
        return [] if rest.strip() in ("", "}") else [Segment(rest)]

    def _grow(self, text: str) -> list[Segment]:
        end = self._scanner.find_end(text)
        arguments, rest = (text, "") if end is None else (text[:end], text[end:])
        if rest:
            self._rest.append(rest)
        if not arguments:
            return []
        self._arguments.append(arguments)
        return [Segment(arguments, call=self._call)]


class _ObjectScanner:
    """Finds where a JSON object ends that arrives in pieces."""

    def __init__(self) -> None:
        self._depth = 0
        self._is_string = False
        self._is_escaped = False
        self._is_done = False

    def find_end(self, text: str) -> int | None:
        """Return where the object's text ends in *text*: 0 if it had ended, None if it goes on."""
        if self._is_done:
            return 0
        position = 0
        if self._is_escaped and text:
            self._is_escaped = False
            position = 1
        while (match := _STRUCTURE.search(text, position)) is not None:
            position = match.end()
            if self._is_string:
                if match[0] == "\\":
                    self._is_escaped = position == len(text)
                    position += 1
                self._is_string = match[0] != '"'
                continue
            self._is_string = match[0] == '"'
            self._depth += {"{": 1, "}": -1}.get(match[0], 0)
            if self._depth == 0 and match[0] == "}":
                self._is_done = True
                return position
        return None


def _string(quoted: str) -> str | None:
    try:
        value = json.loads(quoted, strict=False)
    except ValueError:
        return None
    return value if isinstance(value, str) and value else None


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False
