"""SteadyText: text for a client that can't take back what it has shown."""

from collections import defaultdict
from typing import TypeAlias

from headwater.schemas import Channel, TextSpan

from ..errors import StreamDiverged

_Key: TypeAlias = tuple[int, Channel, int | None]


class SteadyText:
    """Lets only new text through when a job starts over.

    OpenAI's streams have no way to say "discard that". A job that starts over draws the same
    tokens from the same seed, so its text is expected to repeat itself; where it does not, the
    stream has to end with an error.
    """

    def __init__(self) -> None:
        self._sent: defaultdict[_Key, list[str]] = defaultdict(list)
        self._awaited: dict[_Key, str] = {}

    def restart(self) -> None:
        """Expect what was sent so far once more."""
        self._awaited = {key: "".join(pieces) for key, pieces in self._sent.items()}

    def take(self, choice: int, span: TextSpan) -> TextSpan | None:
        """Return the part of *span* that was not sent yet; raises StreamDiverged."""
        key = (choice, span.channel, span.index)
        is_known = key in self._sent
        awaited = self._awaited.get(key, "")
        overlap = min(len(awaited), len(span.text))
        if awaited[:overlap] != span.text[:overlap]:
            raise StreamDiverged("the job started over and came to another text: ask again")
        if awaited:
            self._awaited[key] = awaited[overlap:]
        new = span.after(overlap)
        self._sent[key].append(new.text)
        # A call's first span may hold its name alone.
        return new if new.text or not is_known else None

    def finish(self) -> None:
        """Check that nothing that was sent is missing; raises StreamDiverged."""
        if any(self._awaited.values()):
            raise StreamDiverged("the job started over and came to a shorter text: ask again")
