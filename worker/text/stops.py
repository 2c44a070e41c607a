"""StopMatcher: finds stop strings in a text that arrives in pieces, and never lets one out.

The result is that of a reader who sees the text character by character and stops at the first
moment when it ends with a stop string: the match that *ends* earliest wins, of several that end
there the longest. So it does not depend on how the text was cut into pieces.
"""

import re
from collections import deque
from functools import lru_cache
from typing import NamedTuple

_NUM_KEPT_AUTOMATA = 32
"""Jobs of one application share their stop strings; each set is compiled once."""


class StopOutput(NamedTuple):
    """Text that no stop string can claim any more, and the stop string that was found."""

    text: str
    matched: str | None = None
    rest: str = ""
    """What came behind it in the same piece."""


class _Node:
    """A prefix of one or more stop strings."""

    __slots__ = ("children", "depth", "fail", "match")

    def __init__(self, depth: int) -> None:
        self.children: dict[str, _Node] = {}
        self.depth = depth
        self.fail: _Node | None = None
        """The longest proper suffix of this prefix that is a prefix too."""
        self.match: str | None = None
        """The longest stop string that this prefix ends with."""


class _Automaton:
    """Aho-Corasick over the stop strings."""

    def __init__(self, stops: tuple[str, ...]) -> None:
        self.root = _Node(0)
        for stop in stops:
            self._insert(stop)
        self._link()
        first_chars = sorted({stop[0] for stop in stops})
        self.first_char = re.compile("|".join(re.escape(char) for char in first_chars))
        """Where a stop string can begin."""

    def _insert(self, stop: str) -> None:
        node = self.root
        for char in stop:
            child = node.children.get(char)
            if child is None:
                child = node.children[char] = _Node(node.depth + 1)
            node = child
        node.match = stop

    def _link(self) -> None:
        """Set the fail links, shorter prefixes first."""
        queue = deque([self.root])
        while queue:
            node = queue.popleft()
            for char, child in node.children.items():
                child.fail = self.root if node is self.root else self.step(node.fail, char)
                child.match = child.match or child.fail.match
                queue.append(child)

    def step(self, node: _Node | None, char: str) -> _Node:
        """Return the longest prefix that the text ends with after *char*."""
        while node is not None:
            child = node.children.get(char)
            if child is not None:
                return child
            node = node.fail
        return self.root


@lru_cache(maxsize=_NUM_KEPT_AUTOMATA)
def _automaton(stops: tuple[str, ...]) -> _Automaton:
    return _Automaton(stops)


class StopMatcher:
    """Holds exactly the longest end of the text that could still become a stop string."""

    __slots__ = ("_automaton", "_held", "_node")

    def __init__(self, stops: tuple[str, ...]) -> None:
        """Take at least one stop string, none empty."""
        self._automaton = _automaton(stops)
        self._node = self._automaton.root
        self._held = ""

    def push(self, text: str, *, may_match: bool = True) -> StopOutput:
        """Take more text; after a match or a flush nothing more may be pushed.

        With may_match=False a stop string that ends inside *text* is ordinary text. One that
        begins there may still match later.
        """
        start = 0
        if not self._held:
            first = self._automaton.first_char.search(text)
            if first is None:
                return StopOutput(text)
            start = first.start()
        return self._scan(text, start, may_match=may_match)

    def flush(self) -> str:
        """Return the held text: the output has ended, it can't become a stop string."""
        text, self._held = self._held, ""
        return text

    def _scan(self, text: str, start: int, *, may_match: bool) -> StopOutput:
        node, step = self._node, self._automaton.step
        for position in range(start, len(text)):
            node = step(node, text[position])
            if may_match and node.match is not None:
                return self._cut(text, position + 1, node.match)
        while not node.children and node.fail is not None:
            # A whole stop string that was let through can't grow: only an end of it can.
            node = node.fail
        self._node = node
        return self._hold(self._held + text, node.depth)

    def _cut(self, text: str, end: int, match: str) -> StopOutput:
        seen, self._held = self._held + text[:end], ""
        return StopOutput(seen[: len(seen) - len(match)], match, text[end:])

    def _hold(self, seen: str, num_chars: int) -> StopOutput:
        cut = len(seen) - num_chars
        self._held = seen[cut:]
        return StopOutput(seen[:cut])
