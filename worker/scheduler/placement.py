"""Placement: where one sequence stands in the scheduler's structures."""

from bisect import bisect_left
from collections.abc import Hashable
from dataclasses import dataclass, field
from enum import Enum, auto

from headwater.schemas import Priority

from ..sequence import Sequence

RANKS = {Priority.HIGH: 0, Priority.NORMAL: 1, Priority.LOW: 2}


class Stage(Enum):
    """One step finer than SequenceStatus."""

    WAITING = auto()
    PARKED = auto()
    """Waits for a leader to compute a prefix that both need."""
    RUNNING = auto()
    GONE = auto()


@dataclass(slots=True, eq=False)
class Placement:
    """A sequence and the scheduler's notes on it."""

    sequence: Sequence
    root_key: Hashable
    order: int
    """Place in the order of arrival."""
    tokens: tuple[int, ...]
    """What has to be computed before the next token can be sampled, when last looked at."""
    stage: Stage = Stage.WAITING
    leader: "Placement | None" = None
    awaited_end: int = 0
    """The prefix [0, awaited_end) that a parked sequence waits for."""
    num_held_when_parked: int | None = None
    """Tokens in the prefix cache when it first had to wait for more."""
    takers: "list[Placement]" = field(default_factory=list)
    boundaries: list[int] = field(default_factory=list)
    """Where this prompt's keys and values are still to be committed, ascending."""
    num_prefix_segments: int = 0
    """In how many pieces the engine knows the row's shared prefix."""
    is_listed: bool = False
    """Whether the waiting queue's arrival heap knows it."""

    @property
    def rank(self) -> int:
        """Priority class, the most urgent first."""
        return RANKS[self.sequence.job.priority]

    @property
    def is_solo(self) -> bool:
        """Whether it may have no other row beside it now."""
        sequence = self.sequence
        no_news = len(sequence.output_token_ids) <= sequence.num_resumed_tokens
        return sequence.runs_alone and no_news

    def refresh_tokens(self) -> None:
        """Take in the tokens that were read since it last ran."""
        if len(self.tokens) != self.sequence.num_known_tokens:
            self.tokens = known_tokens(self.sequence)

    def add_boundary(self, position: int) -> None:
        """Commit [0, *position*) when it is computed."""
        index = bisect_left(self.boundaries, position)
        if self.boundaries[index : index + 1] != [position]:
            self.boundaries.insert(index, position)


def known_tokens(sequence: Sequence) -> tuple[int, ...]:
    """Return a sequence's known tokens; the job's own tuple, not a copy, while it is all."""
    prompt = sequence.job.prompt_token_ids
    return (*prompt, *sequence.output_token_ids) if sequence.output_token_ids else prompt
