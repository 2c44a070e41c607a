"""How many prompt tokens a step computes, and whose."""

from collections.abc import Sequence as Seq

from .placement import Placement

FIRST_BUDGET = 128
"""Tokens of a step before anything has been measured."""
MIN_BUDGET = 64
"""Whatever decoding takes: a forward costs much before its first token, so that smaller chunks
would make prompts several times as dear and nobody's next token much earlier."""
CRUMB = 16
"""A part of a prompt that is smaller is left for another step: each costs a pass of attention."""
GRAIN = 16
"""Budgets are multiples of this: fewer different shapes to compile and to cache."""
HEADROOM = 0.9
"""Share of the target that a step is planned for; chunks deep in a prompt cost more."""
MIN_STEP_S = 1e-6
"""A clock may not have moved at all."""
ALONE = 3.0
"""Where nothing decodes, a step may take so many times the target: only who comes waits."""
WEIGHT = 0.3
"""Weight of the newest measurement."""


class PrefillBudget:
    """Prompt tokens a step, so that a step takes no longer than the target."""

    def __init__(self, target_itl_ms: float, max_tokens: int) -> None:
        self._target_s = target_itl_ms / 1e3 * HEADROOM
        self._max_tokens = max_tokens
        self._decode_s: float | None = None
        self._token_s: float | None = None

    def observe(self, seconds: float, num_prefill_tokens: int, num_decode_rows: int) -> None:
        """Learn from one step's measured time."""
        if num_prefill_tokens:
            decode_s = (self._decode_s or 0.0) if num_decode_rows else 0.0
            # A step can be faster than the decode steps before it; its prefill was not free.
            prefill_s = max(seconds - decode_s, seconds / 10, MIN_STEP_S)
            self._token_s = _average(self._token_s, prefill_s / num_prefill_tokens)
        elif num_decode_rows:
            self._decode_s = _average(self._decode_s, seconds)

    @property
    def decode_step_s(self) -> float:
        """Seconds of a decode step; half the target before one has been measured."""
        return self._target_s / 2 if self._decode_s is None else self._decode_s

    def prefill_s(self, num_tokens: int) -> float:
        """Seconds that *num_tokens* of prompts take; 0 before anything has been measured."""
        return num_tokens * (self._token_s or 0.0)

    def num_tokens(self, num_decode_rows: int) -> int:
        """Tokens that the next step may compute besides decoding *num_decode_rows*."""
        if self._token_s is None:
            return min(FIRST_BUDGET, self._max_tokens)
        if num_decode_rows:
            seconds = self._target_s - (self._decode_s or 0.0)
        else:
            seconds = ALONE * self._target_s
        affordable = int(max(0.0, seconds) / self._token_s)
        budget = max(MIN_BUDGET, affordable // GRAIN * GRAIN)
        return min(budget, self._max_tokens)


def share_out(wanted: Seq[tuple[Placement, int]], budget: int) -> list[tuple[Placement, int]]:
    """Divide *budget* over sequences (in the order of admission) that want so many tokens.

    The shortest come first, so that a short prompt is not held behind a long one; half of the
    budget is the oldest's, so that a stream of short prompts cannot stop it.
    """
    if not wanted:
        return []
    oldest, its = wanted[0]
    granted = {oldest: min(its, budget // 2)}
    left = budget - granted[oldest]
    for placement, wants in sorted(wanted, key=lambda pair: pair[1]):
        lacks = wants - granted.get(placement, 0)
        num_tokens = min(lacks, left)
        if placement is oldest or num_tokens == lacks or num_tokens >= CRUMB:
            granted[placement] = granted.get(placement, 0) + num_tokens
            left -= num_tokens
    return [(placement, granted[placement]) for placement, _ in wanted if granted.get(placement)]


def fixed_chunks(
    wanted: Seq[tuple[Placement, int]], chunk: int, budget: int
) -> list[tuple[Placement, int]]:
    """Give each sequence the way to its next multiple of *chunk*, as long as *budget* lasts."""
    granted: list[tuple[Placement, int]] = []
    for placement, wants in wanted:
        num_tokens = min(wants, chunk - placement.sequence.num_computed_tokens % chunk)
        if granted and num_tokens > budget:
            break
        granted.append((placement, num_tokens))
        budget -= num_tokens
    return granted


def _average(old: float | None, new: float) -> float:
    return new if old is None else old + WEIGHT * (new - old)
