"""Outbox: what one running job has to tell its readers, in order, and what they were told.

At most one entry of a stream is unacknowledged. Whatever happens meanwhile is merged into the
next one: coalesced, never dropped.
"""

from array import array
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from io import StringIO
from typing import NamedTuple

from headwater.schemas import (
    Delta,
    DeltaPart,
    End,
    EntryId,
    Event,
    PositionLogprobs,
    PromptPart,
    Released,
    Restarted,
    TextSpan,
)

from .messages import Claim

_TOKEN_BYTES = 8
"""What a token id takes here; in an entry about as much."""
_MAX_PROMPT_BYTES = 256 * 1024
"""Of prompt logprobs in one entry: those of a whole prompt would be many megabytes."""
_KEPT_ENTRIES = 256
"""Confirmed entries that are kept to be sent again, for seconds that a fail-over takes back.

Where it took more, everything is told anew: a job that runs for a day must not fill the memory.
"""


class Entry(NamedTuple):
    """An entry under the id that it keeps however often it is sent."""

    id: EntryId
    event: Event


class LastEntry(NamedTuple):
    """The entry that closes a job for this worker."""

    id: EntryId
    event: End | Released


class PartLog:
    """Parts of several choices, merged into one part for each.

    Held as arrays and buffers: a part for each token would take a hundred times the memory.
    """

    def __init__(self, parts: Iterable[DeltaPart] = ()) -> None:
        self._choices: dict[int, _ChoiceLog] = {}
        self._prompt = _PromptLog()
        self.nbytes = 0
        self.add(parts)

    def __bool__(self) -> bool:
        return bool(self._choices) or bool(self._prompt.positions)

    def add(self, parts: Iterable[DeltaPart]) -> None:
        """Take parts that follow on those before."""
        for part in parts:
            if part.prompt is not None:
                self.nbytes += self._prompt.add(part.prompt)
                if not part.token_ids and not part.text:
                    continue
            log = self._choices.get(part.choice)
            if log is None:
                log = self._choices[part.choice] = _ChoiceLog(part.start)
            self.nbytes += log.add(part)

    def clear(self) -> None:
        """Forget all."""
        self._choices.clear()
        self._prompt = _PromptLog()
        self.nbytes = 0

    def merged(self) -> tuple[DeltaPart, ...]:
        """Return one part a choice that holds all that was added, the prompt's before them."""
        return (*self._prompt.parts(), *self._told())

    def take(self) -> tuple[DeltaPart, ...]:
        """Take out what makes the next entry: of a long prompt it is a piece, of all else all."""
        prompt, num_bytes = self._prompt.take()
        if self._prompt.positions:
            self.nbytes -= num_bytes
            return tuple(prompt)
        parts = (*prompt, *self._told())
        self.clear()
        return parts

    def _told(self) -> tuple[DeltaPart, ...]:
        return tuple(log.part(choice) for choice, log in self._choices.items())


class _PromptLog:
    """Logprobs of prompt tokens, from one on."""

    def __init__(self) -> None:
        self.start = 1
        self.positions: deque[bytes] = deque()
        """Encoded: as models they would take ten times the memory."""

    def add(self, part: PromptPart) -> int:
        """Take the next part and return about how many bytes it takes."""
        if not self.positions:
            self.start = part.start
        new = [each.encode() for each in part.logprobs]
        self.positions += new
        return sum(map(len, new))

    def parts(self) -> Iterator[DeltaPart]:
        """Yield all of it, as one part."""
        if self.positions:
            yield _prompt_part(self.start, self.positions)

    def take(self) -> tuple[list[DeltaPart], int]:
        """Take out what fits into an entry, and say about how many bytes it is."""
        taken: list[bytes] = []
        num_bytes, start = 0, self.start
        while self.positions and num_bytes < _MAX_PROMPT_BYTES:
            taken.append(self.positions.popleft())
            num_bytes += len(taken[-1])
        self.start += len(taken)
        return ([_prompt_part(start, taken)] if taken else []), num_bytes


def _prompt_part(start: int, positions: Iterable[bytes]) -> DeltaPart:
    logprobs = tuple(map(PositionLogprobs.decode, positions))
    # Our own values: validating them again would cost more than making them.
    prompt = PromptPart.model_construct(start=start, logprobs=logprobs)
    return DeltaPart.model_construct(
        choice=0, start=0, token_ids=(), text=(), logprobs=None, prompt=prompt
    )


class _ChoiceLog:
    """What one choice gained, from token *start* on."""

    __slots__ = ("_logprobs", "_spans", "_start", "_token_ids")

    def __init__(self, start: int) -> None:
        self._start = start
        self._token_ids = array("q")
        self._logprobs: list[bytes] = []
        """Encoded: as models they would take ten times the memory."""
        self._spans: list[tuple[TextSpan, StringIO]] = []
        """Runs of one channel's text, each with the span that began it, in their order."""

    def add(self, part: DeltaPart) -> int:
        """Take the next part and return about how many bytes it takes."""
        self._token_ids.extend(part.token_ids)
        for span in part.text:
            if not self._spans or not self._spans[-1][0].is_continued_by(span):
                self._spans.append((span, StringIO()))
            self._spans[-1][1].write(span.text)
        logprobs = [each.encode() for each in part.logprobs or ()]
        self._logprobs += logprobs
        num_text = sum(len(span.text) for span in part.text)
        return _TOKEN_BYTES * len(part.token_ids) + num_text + sum(map(len, logprobs))

    def part(self, choice: int) -> DeltaPart:
        """Return all of it as one part."""
        # Our own values: validating them again would cost more than making them.
        return DeltaPart.model_construct(
            choice=choice,
            start=self._start,
            token_ids=tuple(self._token_ids),
            text=tuple(
                head.model_copy(update={"text": text.getvalue()}) for head, text in self._spans
            ),
            logprobs=tuple(map(PositionLogprobs.decode, self._logprobs)) or None,
            prompt=None,
        )


@dataclass(slots=True, eq=False)
class Outbox:
    """One job's entries on their way. Not locked: the publisher's business."""

    claim: Claim
    attempt: int
    next_seq: int = 1
    pending: PartLog = field(default_factory=PartLog)
    """Not yet in an entry."""
    restart: bool = False
    """Whether readers have to be told that what they have is void, before *pending*."""
    last: End | Released | None = None
    """The job's last entry, once there is one."""
    is_lost: bool = False
    """Whether the job is not ours any more: nothing of it is written, and it only stands here
    until the engine has let go of it."""
    pending_since_s: float | None = None
    """When the oldest of *pending* came, on the publisher's clock."""
    unacknowledged: Entry | None = None
    unacknowledged_since_s: float | None = None
    """When the oldest of what it tells came, on the same clock."""
    acknowledged: deque[Entry] = field(default_factory=lambda: deque(maxlen=_KEPT_ENTRIES))
    """This attempt's newest entries that the server has confirmed; it may lose them all the
    same."""
    is_silent: bool = True
    """Whether the server has nothing new of this attempt: its death would be a strike."""
    has_restarted: bool = False
    """Whether what earlier attempts told was declared void."""
    told: PartLog = field(default_factory=PartLog)
    """Everything that is in entries, earlier attempts included."""

    @classmethod
    def of(cls, claim: Claim) -> "Outbox":
        """Return the outbox of a claim whose fence has just been written."""
        return cls(claim, claim.attempt, told=PartLog(claim.history))

    @property
    def job_id(self) -> str:
        """The job's id."""
        return self.claim.job_id

    @property
    def oldest_s(self) -> float | None:
        """When the oldest came that the server has not confirmed; None when it has it all."""
        return self.unacknowledged_since_s or self.pending_since_s

    @property
    def newest_seq(self) -> int:
        """The highest number that this attempt can have in the stream; its last entry's, if any."""
        return self.next_seq if self.last is not None else self.next_seq - 1

    def void(self) -> None:
        """Tell readers to drop what they have; what waits to be told is void, too."""
        self.restart = True
        self.pending.clear()
        self.pending_since_s = None

    def next_entry(self, worker_id: str, sampler_version: int) -> Entry | None:
        """Return the entry to send now: the unacknowledged one again, or a new one.

        None when there is nothing to say, or only the last entry, which takes a transaction.
        """
        if self.unacknowledged is None and self.restart:
            self.restart = False
            self.has_restarted = True
            self.told.clear()
            self._open(Restarted(worker_id=worker_id, sampler_version=sampler_version))
        elif self.unacknowledged is None and self.pending:
            parts = self.pending.take()
            self.told.add(parts)
            self.unacknowledged_since_s, self.pending_since_s = self.pending_since_s, None
            self._open(Delta(parts=parts))
        return self.unacknowledged

    def acknowledge(self) -> None:
        """Note that the server has the unacknowledged entry."""
        if self.unacknowledged is not None:
            self.acknowledged.append(self.unacknowledged)
            self.is_silent = self.is_silent and not isinstance(self.unacknowledged.event, Delta)
            self.unacknowledged = self.unacknowledged_since_s = None

    def rewind(self, last_id: EntryId) -> list[Entry] | None:
        """Return the confirmed entries that a server whose last entry is *last_id* has lost.

        None where they are more than are kept.
        """
        if self.acknowledged and self.acknowledged[0].id.seq > last_id.seq + 1:
            return None
        return [entry for entry in self.acknowledged if entry.id > last_id]

    def begin_anew(self, attempt: int) -> None:
        """Start over under another attempt: all is to be told, as a part of the stream is lost.

        What readers have of it already, they drop by its position.
        """
        told, rest = PartLog() if self.restart else self.told, self.pending
        # Where the lost part voided what came before it, that has to be said again.
        self.restart = self.restart or self.has_restarted
        self.attempt = attempt
        self.next_seq = 1
        self.pending_since_s, self.unacknowledged_since_s = self.oldest_s, None
        self.unacknowledged = None
        self.acknowledged.clear()
        self.is_silent = True
        self.told, self.pending = PartLog(), PartLog(told.merged())
        self.pending.add(rest.merged())

    def last_entry(self) -> LastEntry | None:
        """Return the job's last entry when everything before it is confirmed."""
        is_due = self.unacknowledged is None and not self.pending and not self.restart
        if self.last is None or not is_due:
            return None
        return LastEntry(EntryId(self.attempt, self.next_seq), self.last)

    def _open(self, event: Event) -> None:
        self.unacknowledged = Entry(EntryId(self.attempt, self.next_seq), event)
        self.next_seq += 1
