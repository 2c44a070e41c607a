"""What crosses the worker's threads: claims, and the messages of the engine's inbox."""

from dataclasses import dataclass
from typing import TypeAlias

from headwater.schemas import CacheClear, DeltaPart, GenerationJob


@dataclass(frozen=True, slots=True)
class Claim:
    """A job that is this worker's: its RQ execution, its attempt, and what is published of it."""

    job: GenerationJob
    queue_name: str
    execution_id: str
    """RQ's; it also names the claimant of the attempt."""
    attempt: int
    next_seq: int = 1
    """The number of this attempt's next entry; the fence has number 0."""
    history: tuple[DeltaPart, ...] = ()
    """What earlier attempts published since the last `restarted`, in order."""
    sampler_version: int | None = None
    """Of the attempts that wrote the history."""
    first_started_ms: int = 0
    """Redis' time of the job's first fence."""
    begun_at_ms: int = 0
    """Redis' time of this attempt's fence."""
    enqueued_at_ms: int | None = None
    strikes: int = 0
    """Attempts in a row that ended in their worker's death without a new token."""

    @property
    def job_id(self) -> str:
        """The job's id."""
        return self.job.job_id

    @property
    def age_s(self) -> float:
        """Seconds from the job's first start to this attempt's."""
        return (self.begun_at_ms - self.first_started_ms) / 1e3

    @property
    def is_overdue(self) -> bool:
        """Whether the job's deadline had passed when this attempt began."""
        return self.job.deadline_s is not None and self.age_s >= self.job.deadline_s

    @property
    def queue_ms(self) -> float | None:
        """Milliseconds from enqueueing to the first start, where known."""
        if self.enqueued_at_ms is None:
            return None
        return float(max(0, self.first_started_ms - self.enqueued_at_ms))


@dataclass(frozen=True, slots=True)
class Admit:
    """Run this job."""

    claim: Claim


@dataclass(frozen=True, slots=True)
class Cancel:
    """Somebody asked for the job's end."""

    job_id: str


@dataclass(frozen=True, slots=True)
class Drop:
    """The job is not ours any more: forget it and write nothing.

    Until the engine has done so, the publisher keeps the job's place, and it is not claimed again.
    """

    job_id: str


Message: TypeAlias = Admit | Cancel | Drop | CacheClear
