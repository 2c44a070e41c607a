"""CallEndMatcher: finds the marker that ends a tool call, wherever its JSON holds the same text."""

from .json_scanner import JsonScanner, JsonState
from .stops import StopMatcher, StopOutput


class CallEndMatcher:
    """As StopMatcher, but a marker in a string of the call's JSON is a part of that string.

    Models leave out quotes: where a string ends is only certain once the object or array is
    whole. Until then the text from the first marker in it on is held; where the text turns out
    to be no JSON, that marker was the end of the call. What does not begin as JSON is searched as
    StopMatcher does.
    """

    def __init__(self, markers: tuple[str, ...]) -> None:
        self._markers = markers
        self._stops = StopMatcher(markers)
        self._json = JsonScanner()
        self._marker: str | None = None
        """The first one that may stand in a string; all that is held begins with it."""
        self._held: list[str] = []
        """What came behind it."""

    def push(self, text: str) -> StopOutput:
        """Take more text; after a match nothing more may be pushed."""
        if self._marker is not None:
            return self._wait(text)
        output = self._stops.push(text)
        self._json.push(text[: len(text) - len(output.rest)])
        if output.matched is None or not self._json.is_open:
            return output
        self._marker = output.matched
        later = self._wait(output.rest)
        return later._replace(text=output.text + later.text)

    def settle(self) -> StopOutput | None:
        """Return the match that was held, as no more text comes; None if there is none."""
        if self._marker is None:
            return None
        return StopOutput("", self._marker, "".join(self._held))

    def flush(self) -> str:
        """Return the held text, which holds no marker: settle() has said so."""
        return self._stops.flush()

    def _wait(self, text: str) -> StopOutput:
        num_inside = self._json.push(text)
        self._held.append(text)
        if self._json.state is JsonState.OPEN:
            return StopOutput("")
        if self._json.state is JsonState.BROKEN:
            assert self._marker is not None
            return StopOutput("", self._marker, "".join(self._held))
        return self._release(len(text) - num_inside)

    def _release(self, num_behind: int) -> StopOutput:
        """Let out the whole JSON, and search the *num_behind* characters behind it."""
        assert self._marker is not None
        seen = self._marker + "".join(self._held)
        self._marker, self._held = None, []
        self._stops = StopMatcher(self._markers)
        cut = len(seen) - num_behind
        output = self._stops.push(seen[cut:])
        return output._replace(text=seen[:cut] + output.text)
