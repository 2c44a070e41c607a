"""JsonScanner: whether a text that arrives in pieces can still become a JSON object or array."""

import re
from enum import Enum, auto
from typing import Final

_SIGN: Final = re.compile(r'[ \t\r\n]+|[-+.0-9A-Za-z]+|["{}\[\]:,]')
_WORD: Final = "w"
"""Stands for numbers, true, false and null, whose letters are not looked at."""
_IN_STRING: Final = re.compile(r'[^"\\\x00-\x1f]*')

_CLOSERS: Final = {"{": "}", "[": "]"}
_VALUE: Final = '"{[' + _WORD
_KEY: Final = '"'


class JsonState(Enum):
    """What is known of the text so far."""

    OPEN = auto()
    """More may follow, and has to."""
    WHOLE = auto()
    BROKEN = auto()
    """Nothing that follows makes it JSON."""


class JsonScanner:
    """Follows one object or array; what it finds does not depend on how the text was cut."""

    def __init__(self) -> None:
        self.state = JsonState.OPEN
        self._expected = "{["
        """The signs that may come next, each by one letter."""
        self._closers: list[str] = []
        """Of the objects and arrays that are open, the innermost one's last."""
        self._is_string = False
        self._is_escaped = False
        self._is_word = False

    @property
    def is_open(self) -> bool:
        """Whether the text may go on."""
        return self.state is JsonState.OPEN

    def push(self, text: str) -> int:
        """Take more text; return how much of it belongs to the value: all while that is open.

        Where it is broken that says nothing.
        """
        position = 0
        while self.is_open and position < len(text):
            read = self._read_string if self._is_string else self._read_sign
            position = read(text, position)
        return position

    def _read_string(self, text: str, position: int) -> int:
        if self._is_escaped:
            self._is_escaped = False
            return position + 1
        match = _IN_STRING.match(text, position)
        assert match is not None
        position = match.end()
        if position == len(text):
            return position
        if text[position] == "\\":
            self._is_escaped = True
        elif text[position] == '"':
            self._is_string = False
        else:
            self.state = JsonState.BROKEN
        return position + 1

    def _read_sign(self, text: str, position: int) -> int:
        match = _SIGN.match(text, position)
        if match is None:
            self.state = JsonState.BROKEN
            return position
        sign = match[0]
        if sign[0] in '"{}[]:,':
            self._is_word = False
            self._take(sign)
        elif sign.isspace():
            self._is_word = False
        elif not self._is_word:
            # A word that was cut goes on where it was.
            self._is_word = True
            self._take(_WORD)
        return match.end()

    def _take(self, sign: str) -> None:
        if sign not in self._expected:
            self.state = JsonState.BROKEN
        elif sign in _CLOSERS:
            self._closers.append(_CLOSERS[sign])
            self._expected = (_KEY if sign == "{" else _VALUE) + _CLOSERS[sign]
        elif sign == ":":
            self._expected = _VALUE
        elif sign == ",":
            self._expected = _KEY if self._closers[-1] == "}" else _VALUE
        elif sign in "]}":
            self._closers.pop()
            self._end_value()
        else:
            is_key = _WORD not in self._expected
            self._is_string = sign == '"'
            self._end_value()
            if is_key:
                self._expected = ":"

    def _end_value(self) -> None:
        if self._closers:
            self._expected = "," + self._closers[-1]
        else:
            self.state = JsonState.WHOLE
