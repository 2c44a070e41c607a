"""What the scheduler is told: its limits, and what a row costs in memory."""

from dataclasses import dataclass

from ..allocation import EXACT, Allocation


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """Bytes that rows cost, as far as they can be known before they exist."""

    bytes_per_token: int = 0
    """Keys and values of one token."""
    bytes_per_row: int = 0
    """What a row costs whatever its length (recurrent states)."""
    bytes_per_window_token: int = 0
    """Keys and values of one token in layers with a sliding window."""
    window_tokens: int = 0
    """Tokens that such layers keep."""
    bytes_per_prefill_token: int = 0
    """Activations of one token in a prefill forward; freed after it."""
    reading_nbytes: int = 0
    """Logits of a forward in which prompts are read, whoever's they are; freed after it."""
    shares_prefix: bool = False
    """Whether rows refer to the prefix cache's segments instead of copying them."""
    allocation: Allocation = EXACT

    def row_nbytes(self, num_tokens: int, num_shared_tokens: int) -> int:
        """Bytes of a row of *num_tokens* of which the prefix cache holds *num_shared_tokens*."""
        own = num_tokens - num_shared_tokens if self.shares_prefix else num_tokens
        held = self.allocation.held_tokens(own)
        return self.state_nbytes(num_tokens) + self.bytes_per_token * held

    def commit_nbytes(self, start: int, end: int) -> int:
        """Bytes of tokens [*start*, *end*) in the prefix cache, with the state at *end*."""
        return self.state_nbytes(end) + self.bytes_per_token * (end - start)

    def spare_nbytes(self, rows_nbytes: int) -> int:
        """Bytes that may be kept of rows that have gone, beside *rows_nbytes* of others."""
        spare = self.allocation.spare_tokens * self.bytes_per_token
        return max(spare, int(self.allocation.spare_share * rows_nbytes))

    def state_nbytes(self, num_tokens: int) -> int:
        """Bytes of a state after *num_tokens*."""
        window = min(num_tokens, self.window_tokens)
        return self.bytes_per_row + self.bytes_per_window_token * window


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerSettings:
    """Limits and targets of the scheduling policy."""

    max_batch: int = 32
    """Sequences that have a row at once."""
    max_bytes: int | None = None
    """Budget of rows, prefix cache and activations together; None is unlimited."""
    footprint: Footprint = Footprint()
    target_itl_ms: float = 400.0
    """A running sequence waits at most about this long for its next token."""
    prefill_chunk: int | None = None
    """Chunks end at multiples of this many tokens; None adapts them to target_itl_ms."""
    max_prefill_tokens: int = 2048
    """Prompt tokens of one step at most."""
    max_wait_s: float = 30.0
    """A sequence that waits longer is overtaken by nobody who came later in another class."""
    lookahead: int = 64
    """Waiting sequences of a class that are brought into the trie's order at a time."""
    min_shared_tokens: int = 16
    """A shared prefix that is shorter is not worth waiting for."""
    snapshot_stride: int = 512
    """Rows whose state can't be cut later leave a copy of it every so many prompt tokens."""
    keeps_prompts: bool = False
    """Prompts go into the prefix cache when they are computed, not when they are shared or end."""
    growth_tokens: int = 64
    """Tokens of growth of every running sequence that memory is planned for."""
