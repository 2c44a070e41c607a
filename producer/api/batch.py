"""Batch: the state of one batch, as it lies on disk and as OpenAI shows it."""

import secrets
from enum import StrEnum
from typing import Any, Self

from headwater.schemas import WireModel
from pydantic import Field

from ..openai_protocol.caller import Caller

WINDOW_S = 24 * 3600
"""OpenAI's only completion window."""


class BatchStatus(StrEnum):
    """OpenAI's states of a batch."""

    VALIDATING = "validating"
    IN_PROGRESS = "in_progress"
    CANCELLING = "cancelling"
    FINALIZING = "finalizing"
    COMPLETED = "completed"
    FAILED = "failed"
    EXPIRED = "expired"
    CANCELLED = "cancelled"


_ENDED = frozenset(
    {BatchStatus.COMPLETED, BatchStatus.FAILED, BatchStatus.EXPIRED, BatchStatus.CANCELLED}
)


class Counts(WireModel):
    """Rows of a batch."""

    total: int = 0
    completed: int = 0
    failed: int = 0


class Batch(WireModel):
    """One batch. A change is a new object, written whole."""

    id: str
    endpoint: str
    input_file_id: str
    status: BatchStatus = BatchStatus.VALIDATING
    caller: Caller
    """Who made it: its rows are submitted within this caller's limits."""
    created_at: int
    expires_at: int
    metadata: dict[str, str] | None = None
    errors: tuple[str, ...] = ()
    """Why it failed as a whole."""
    is_cancelled: bool = False
    has_expired: bool = False
    """Whether a row could not run in time."""
    counts: Counts = Counts()
    times: dict[str, int] = Field(default_factory=dict)
    """Unix seconds of `in_progress_at`, `cancelling_at`, ..."""
    output_file_id: str | None = None
    error_file_id: str | None = None

    @classmethod
    def new(
        cls,
        endpoint: str,
        input_file_id: str,
        caller: Caller,
        now: int,
        metadata: dict[str, str] | None,
    ) -> Self:
        """Return a batch that has yet to be validated."""
        return cls(
            id=f"batch_{secrets.token_hex(16)}",
            endpoint=endpoint,
            input_file_id=input_file_id,
            caller=caller,
            created_at=now,
            expires_at=now + WINDOW_S,
            metadata=metadata,
        )

    @property
    def has_ended(self) -> bool:
        """Whether nothing more happens to it."""
        return self.status in _ENDED

    @property
    def ended_at(self) -> int | None:
        """Unix seconds of its end; None while it has not ended."""
        return self.times.get(f"{self.status.value}_at") if self.has_ended else None

    def now_in(self, status: BatchStatus, now: int, **changes: Any) -> Self:
        """Return the batch in another state, with the time of the change."""
        times = {**self.times, f"{status.value}_at": now}
        return self.model_copy(update={"status": status, "times": times, **changes})

    def shown(self) -> dict[str, Any]:
        """Return OpenAI's batch object."""
        problems = [{"code": "invalid_file", "message": text} for text in self.errors]
        moments = (f"{each.value}_at" for each in BatchStatus if each != BatchStatus.VALIDATING)
        times = {moment: self.times.get(moment) for moment in moments}
        return {
            "id": self.id,
            "object": "batch",
            "endpoint": self.endpoint,
            "errors": {"object": "list", "data": problems} if problems else None,
            "input_file_id": self.input_file_id,
            "completion_window": "24h",
            "status": self.status.value,
            "output_file_id": self.output_file_id,
            "error_file_id": self.error_file_id,
            "created_at": self.created_at,
            "expires_at": self.expires_at,
            **times,
            "request_counts": self.counts.model_dump(),
            "metadata": self.metadata,
        }
