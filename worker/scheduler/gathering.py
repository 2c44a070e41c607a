"""Gathering: prompts that come together begin to decode together."""

from collections.abc import Sequence as Seq
from typing import Final

from headwater.schemas import Priority

from .placement import Placement
from .prefill import PrefillBudget

MAX_STEPS: Final = 64
"""Nobody's first token waits longer than so many decode steps take: as much as is gained. A device
that decodes fast gains little by it, and has nobody wait."""
MAX_STEPS_EACH: Final = 16
"""A prompt that takes longer than so many decode steps is not waited for."""


class Gathering:
    """Lets prompts that are computed but for their last token wait until the others are, too.

    A decode step costs nearly as much for a few rows as for many, and beside decoding rows
    prompts get on in small chunks, which cost more a token. So where nothing decodes yet, rows
    that are ready early wait a little: all are done sooner, most have their first token sooner.
    """

    def __init__(self, budget: PrefillBudget) -> None:
        self._budget = budget
        self._since: float | None = None

    def is_open(self, rows: Seq[Placement], now: float) -> bool:
        """Say whether those who are ready among *rows* may wait at all."""
        if any(_is_urgent(row) or _has_begun(row) for row in rows):
            self._since = None
            return False
        limit = MAX_STEPS * self._budget.decode_step_s
        return self._since is None or now - self._since <= limit

    def hold_back(
        self,
        wanted: Seq[tuple[Placement, int]],
        granted: list[tuple[Placement, int]],
        ready: list[Placement],
        num_parked: int,
        now: float,
    ) -> tuple[list[tuple[Placement, int]], list[Placement]]:
        """Return who computes how much of its prompt in the step at *now*, and who decodes.

        Without us it would be *granted*, of all who lack some of theirs (*wanted*), and *ready*.
        *num_parked* wait for the prefix of one of these.
        """
        given = dict(granted)
        lacks = {
            placement: placement.sequence.num_pending_tokens - given.get(placement, 0)
            for placement, _ in wanted
            if not placement.sequence.ends_with_prompt
        }
        rest = [num_tokens for num_tokens in lacks.values() if num_tokens]
        is_anybody_ready = bool(ready) or len(rest) < len(lacks)
        if not granted or not self._waits(rest, num_parked, now, is_anybody_ready=is_anybody_ready):
            return granted, ready
        # The last token of a prompt is computed in the step that begins to decode.
        held = {placement for placement, num_tokens in lacks.items() if not num_tokens}
        return [(placement, num - (placement in held)) for placement, num in granted], []

    def _waits(
        self, rest: Seq[int], num_parked: int, now: float, *, is_anybody_ready: bool
    ) -> bool:
        """Say whether those who are ready wait for prompts that lack *rest* after this step."""
        limit = MAX_STEPS_EACH * self._budget.decode_step_s
        is_short = [self._budget.prefill_s(num_tokens) <= limit for num_tokens in rest]
        waits = is_anybody_ready and (any(is_short) or (num_parked > 0 and all(is_short)))
        if not waits:
            self._since = None
        elif self._since is None:
            self._since = now
        return waits


def _is_urgent(row: Placement) -> bool:
    return row.sequence.job.priority is Priority.HIGH


def _has_begun(row: Placement) -> bool:
    return row.sequence.num_output_tokens > 0
