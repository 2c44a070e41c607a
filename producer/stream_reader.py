"""StreamReader: the rules by which a job's entries become output, without any input or output."""

from io import StringIO
from typing import NamedTuple, TypeAlias

from headwater.schemas import (
    END_TYPES,
    FENCE_TYPES,
    Channel,
    Delta,
    DeltaPart,
    End,
    EntryId,
    Fence,
    PositionLogprobs,
    PromptPart,
    Released,
    Restarted,
    StreamEntry,
    TextSpan,
)

from .errors import StreamDiverged, StreamGap


class AttemptOpened(NamedTuple):
    """A worker has taken the job up; what was shown so far stays."""

    id: EntryId
    fence: Fence


class Restart(NamedTuple):
    """What was shown so far is void: discard it. The text begins anew."""

    id: EntryId
    fence: Restarted


class Output(NamedTuple):
    """New tokens and text of one choice; nothing in it was given before."""

    id: EntryId
    """Of the entry that it came with. Resume after it once all of its outputs are handled."""
    choice: int
    start: int
    """Tokens of the choice before these."""
    token_ids: tuple[int, ...]
    text: tuple[TextSpan, ...]
    logprobs: tuple[PositionLogprobs, ...] | None = None
    """One for each of *token_ids*, if the job asks for them."""
    prompt: PromptPart | None = None
    """Logprobs of prompt tokens, in choice 0 of a job that asks for them."""
    is_last: bool = True
    """Whether it is its entry's last: who has handled it may resume after the entry."""


class Ended(NamedTuple):
    """The job's end; nothing follows."""

    id: EntryId
    event: End


TailItem: TypeAlias = AttemptOpened | Restart | Output | Ended


class StreamReader:
    """Turns a stream's entries, in order and from its first one, into items.

    Overlaps between attempts are dropped, holes and contradictions are errors: what comes out
    holds every token and every character exactly once.
    """

    def __init__(self) -> None:
        self.last_id = EntryId(0, 0)
        """Where to read on; attempts count from 1."""
        self.end: Ended | None = None
        self._tokens: dict[int, list[int]] = {}
        self._texts: dict[tuple[int, Channel, int | None], _KeptText] = {}
        self._prompt: list[int] = []
        """The prompt's tokens from the second on, as far as their logprobs were given."""

    def feed(self, entry: StreamEntry) -> list[TailItem]:
        """Take the next entry; raises StreamGap and StreamDiverged. Past the end: ignored."""
        if self.end is not None:
            return []
        self._check_order(entry)
        self.last_id = entry.id
        event = entry.event
        if isinstance(event, Delta):
            outputs = [self._take(entry.id, part) for part in event.parts]
            new = [output for output in outputs if output.token_ids or output.text or output.prompt]
            return [*(output._replace(is_last=False) for output in new[:-1]), *new[-1:]]
        if isinstance(event, END_TYPES):
            self.end = Ended(entry.id, event)
            return [self.end]
        if isinstance(event, Restarted):
            self._tokens.clear()
            self._texts.clear()
            self._prompt.clear()
            return [Restart(entry.id, event)]
        if isinstance(event, Released):
            return []
        return [AttemptOpened(entry.id, event)]

    def _check_order(self, entry: StreamEntry) -> None:
        last, new = self.last_id, entry.id
        if new.attempt == last.attempt:
            if new.seq != last.seq + 1:
                raise StreamGap(f"entry {new} came after {last}: entries between are missing")
        elif new.attempt < last.attempt or new.seq != 0:
            raise StreamGap(f"entry {new} came after {last}: attempt {new.attempt} has no start")
        elif not isinstance(entry.event, FENCE_TYPES + END_TYPES):
            raise StreamGap(f"entry {new} is a {entry.event.type}, which can't open an attempt")

    def _take(self, entry_id: EntryId, part: DeltaPart) -> Output:
        where = f"entry {entry_id}, choice {part.choice}"
        known = self._tokens.setdefault(part.choice, [])
        overlap = known[part.start : part.start + len(part.token_ids)]
        _check_overlap(len(known), part.start, overlap, part.token_ids, f"{where}, token")
        num_old = len(overlap)
        new = part.token_ids[num_old:]
        known.extend(new)
        spans = (self._take_span(where, part.choice, span) for span in part.text)
        text = tuple(span for span in spans if span.text)
        start = part.start + num_old
        logprobs = part.logprobs and part.logprobs[num_old:]
        prompt = part.prompt and self._take_prompt(where, part.prompt)
        return Output(entry_id, part.choice, start, new, text, logprobs, prompt)

    def _take_prompt(self, where: str, part: PromptPart) -> PromptPart | None:
        known, new = self._prompt, tuple(each.token_id for each in part.logprobs)
        overlap = known[part.start - 1 : part.end - 1]
        where = f"{where}, prompt token"
        _check_overlap(len(known), part.start - 1, overlap, new, where)
        known.extend(new[len(overlap) :])
        return part.after(len(overlap)) if len(overlap) < len(new) else None

    def _take_span(self, where: str, choice: int, span: TextSpan) -> TextSpan:
        key = (choice, span.channel, span.index)
        known = self._texts.setdefault(key, _KeptText())
        overlap = known.read(span.text_start, len(span.text))
        where = f"{where}, {span.channel} character"
        _check_overlap(known.length, span.text_start, overlap, span.text, where)
        num_old = len(overlap)
        new = span.text[num_old:]
        known.append(new)
        return span.after(num_old)


class _KeptText:
    """A channel's text so far; grows without being copied."""

    def __init__(self) -> None:
        self.length = 0
        self._buffer = StringIO()

    def append(self, text: str) -> None:
        self._buffer.write(text)
        self.length += len(text)

    def read(self, start: int, length: int) -> str:
        if start >= self.length:
            return ""
        self._buffer.seek(start)
        text = self._buffer.read(length)
        self._buffer.seek(self.length)
        return text


def _check_overlap(
    num_known: int,
    start: int,
    known: list[int] | str,
    new: tuple[int, ...] | str,
    where: str,
) -> None:
    """Compare *new*, which stands at *start*, with what is *known* from there on."""
    if start > num_known:
        raise StreamGap(f"{where} {num_known} is missing: the entry starts at {start}")
    for index, (old, again) in enumerate(zip(known, new, strict=False)):
        if old != again:
            raise StreamDiverged(f"{where} {start + index} was {old!r} before and is {again!r} now")
