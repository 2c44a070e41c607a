"""Outbox: what one running job has to tell its readers, in order, and what they were told.

At most one entry of a stream is unacknowledged. Whatever happens meanwhile is merged into the
next one: coalesced, never dropped.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from headwater.schemas import Delta, DeltaPart, End, EntryId, Event, Released, Restarted, TextSpan

from .messages import Claim

_TOKEN_BYTES = 8
"""What a token id takes in an entry, about."""


class Entry(NamedTuple):
    """An entry under the id that it keeps however often it is sent."""

    id: EntryId
    event: Event


class LastEntry(NamedTuple):
    """The entry that closes a job for this worker."""

    id: EntryId
    event: End | Released


class PartLog:
    """Parts of several choices, merged into one part for each."""

    def __init__(self, parts: Iterable[DeltaPart] = ()) -> None:
        self._parts: dict[int, list[DeltaPart]] = {}
        self.nbytes = 0
        self.add(parts)

    def __bool__(self) -> bool:
        return bool(self._parts)

    def add(self, parts: Iterable[DeltaPart]) -> None:
        """Take parts that follow on those before."""
        for part in parts:
            self._parts.setdefault(part.choice, []).append(part)
            self.nbytes += part_nbytes(part)

    def clear(self) -> None:
        """Forget all."""
        self._parts.clear()
        self.nbytes = 0

    def merged(self) -> tuple[DeltaPart, ...]:
        """Return one part a choice that holds all that was added."""
        return tuple(_merge(parts) for parts in self._parts.values())


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
    unacknowledged: Entry | None = None
    acknowledged: list[Entry] = field(default_factory=list)
    """This attempt's entries that the server has confirmed; it may lose the newest of them."""
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
    def is_silent(self) -> bool:
        """Whether the server has nothing new of this attempt: its death would be a strike."""
        return not any(isinstance(entry.event, Delta) for entry in self.acknowledged)

    @property
    def newest_seq(self) -> int:
        """The highest number that this attempt can have in the stream; its last entry's, if any."""
        return self.next_seq if self.last is not None else self.next_seq - 1

    def void(self) -> None:
        """Tell readers to drop what they have; what waits to be told is void, too."""
        self.restart = True
        self.pending.clear()

    def next_entry(self, worker_id: str, sampler_version: int) -> Entry | None:
        """Return the entry to send now: the unacknowledged one again, or a new one.

        None when there is nothing to say, or only the last entry, which takes a transaction.
        """
        if self.unacknowledged is None and self.restart:
            self.restart = False
            self.told.clear()
            self._open(Restarted(worker_id=worker_id, sampler_version=sampler_version))
        elif self.unacknowledged is None and self.pending:
            parts = self.pending.merged()
            self.told.add(parts)
            self.pending = PartLog()
            self._open(Delta(parts=parts))
        return self.unacknowledged

    def acknowledge(self) -> None:
        """Note that the server has the unacknowledged entry."""
        if self.unacknowledged is not None:
            self.acknowledged.append(self.unacknowledged)
            self.unacknowledged = None

    def rewind(self, last_id: EntryId) -> list[Entry]:
        """Return the confirmed entries that a server whose last entry is *last_id* has lost."""
        return [entry for entry in self.acknowledged if entry.id > last_id]

    def begin_anew(self, attempt: int) -> None:
        """Start over under another attempt: all is to be told, as a part of the stream is lost.

        What readers have of it already, they drop by its position.
        """
        sent = [*self.acknowledged, *([self.unacknowledged] if self.unacknowledged else [])]
        told, rest = PartLog() if self.restart else self.told, self.pending
        # Where the lost part voided what came before it, that has to be said again.
        self.restart = self.restart or any(isinstance(entry.event, Restarted) for entry in sent)
        self.attempt = attempt
        self.next_seq = 1
        self.unacknowledged = None
        self.acknowledged.clear()
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


def part_nbytes(part: DeltaPart) -> int:
    """Return about how many bytes *part* takes in memory and in a stream."""
    return _TOKEN_BYTES * len(part.token_ids) + sum(len(span.text) for span in part.text)


def _merge(parts: list[DeltaPart]) -> DeltaPart:
    if len(parts) == 1:
        return parts[0]
    # Our own values: validating them again would cost more than making them.
    return DeltaPart.model_construct(
        choice=parts[0].choice,
        start=parts[0].start,
        token_ids=tuple(token for part in parts for token in part.token_ids),
        text=_merge_spans([span for part in parts for span in part.text]),
    )


def _merge_spans(spans: list[TextSpan]) -> tuple[TextSpan, ...]:
    """Join adjacent spans of one channel; their order between channels stays."""
    merged: list[list[TextSpan]] = []
    for span in spans:
        if merged and merged[-1][0].channel == span.channel:
            merged[-1].append(span)
        else:
            merged.append([span])
    return tuple(
        run[0].model_copy(update={"text": "".join(span.text for span in run)}) for run in merged
    )
