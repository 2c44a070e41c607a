"""StepPlan: what the engine does in one step, in the order of its fields."""

from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

from ..segment import Segment
from ..sequence import ScheduledSequence, Sequence

S = TypeVar("S", bound=Segment)


class Commit(NamedTuple):
    """Tokens [start, end) of a row go into the prefix cache, with the row's state at *end*."""

    sequence: Sequence
    start: int
    end: int


class RowPrefix(NamedTuple, Generic[S]):
    """A sequence and the cached segments that its row starts with."""

    sequence: Sequence
    prefix: list[S]


@dataclass(slots=True)
class StepPlan(Generic[S]):
    """One step. A sequence is in at most one of *prefill* and *decode*."""

    early_commits: list[Commit] = field(default_factory=list)
    """Of rows that are about to go."""
    detach: list[Sequence] = field(default_factory=list)
    """Ended, cancelled or preempted."""
    admit: list[RowPrefix[S]] = field(default_factory=list)
    """Get a row."""
    rebase: list[RowPrefix[S]] = field(default_factory=list)
    """Running rows that share segments which have been cut since."""
    prefill: list[ScheduledSequence] = field(default_factory=list)
    """Two or more known tokens each."""
    decode: list[Sequence] = field(default_factory=list)
    """One token each: the unread one, or the last known one of a prompt."""
    commits: list[Commit] = field(default_factory=list)
    """After the launch; a whole state is exactly what its row has computed then."""
    num_preempted: int = 0

    @property
    def has_work(self) -> bool:
        """Whether there is anything to launch."""
        return bool(self.prefill or self.decode)

    @property
    def num_prefill_tokens(self) -> int:
        """Tokens of all prefill chunks."""
        return sum(scheduled.num_tokens for scheduled in self.prefill)
