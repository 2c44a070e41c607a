"""Outbox: what one running job has to tell its readers, in order, and what they were told.

At most one entry of a stream is unacknowledged. Whatever happens meanwhile is merged into the
next one: coalesced, never dropped.
"""

from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

from headwater.schemas import (
    Delta,
    End,
    EntryId,
    Event,
    Released,
    Restarted,
)

from .messages import Claim
from .part_log import PartLog

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
