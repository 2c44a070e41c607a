"""Sequence: one choice of one job, the one mutable record of its way through the worker."""

from dataclasses import dataclass, field, replace
from enum import Enum, auto
from typing import Any, NamedTuple, Protocol

from headwater.schemas import GenerationJob, Pooling


class SequenceStatus(Enum):
    """Where a sequence stands; parking is the scheduler's private affair."""

    WAITING = auto()
    """No row in the engine: not admitted yet, or preempted."""
    RUNNING = auto()
    """Has a row in the engine and computes towards its length."""
    FINISHED = auto()
    """Ended, cancelled or dropped; a token of it that still comes back is ignored."""


class TokenConstraint(Protocol):
    """What decides which tokens an output may hold, beside the model."""

    def allowed(self, output_token_ids: list[int]) -> bytes:
        """Return which tokens may come next: one bit each, the lowest of a byte first.

        The output only ever grows between calls. No bit is set when nothing can follow; error()
        says why.
        """
        ...

    def error(self) -> str | None:
        """Return why the output can't go on, if it can't."""
        ...


@dataclass(frozen=True, slots=True)
class Readout:
    """What is read off a prompt's forward."""

    first_position: int
    """The prompt's positions before this one may come from a cache."""
    targets: tuple[int, ...] = ()
    """Where logprobs are read: the tokens that come after each position from there on."""
    pooling: Pooling | None = None
    """For embeddings."""
    num_top: int | None = None
    """For prompt logprobs: how many of the likeliest tokens are told. Such a sequence goes on to
    generate; others end with their prompt."""

    @property
    def precedes_generation(self) -> bool:
        """Whether the sequence goes on behind its prompt."""
        return self.num_top is not None

    def behind(self, position: int) -> "Readout | None":
        """Return what is still to be read from *position* on; None where that is nothing."""
        targets = self.targets[position - self.first_position :]
        return replace(self, first_position=position, targets=targets) if targets else None


@dataclass(slots=True, eq=False)
class Sequence:
    """One choice of one job.

    There is no prefill phase and no decode phase: *num_computed_tokens* catches up with
    *num_tokens*. A prefix hit starts it above zero, a chunk is a part of the gap, decoding is
    a gap of one.

        [0, cached)          computed by somebody else, shared, held by the prefix cache
        [cached, computed)   launched by us
        [computed, tokens)   without keys and values yet

    0 <= num_cached_tokens <= num_computed_tokens <= num_tokens.
    """

    job: GenerationJob
    choice: int = 0
    output_token_ids: list[int] = field(default_factory=list)
    """Tokens read back from the device, those of earlier attempts first."""
    num_resumed_tokens: int = 0
    """How many of them an earlier attempt published."""
    num_unread_tokens: int = 0
    """Sampled tokens whose values the host has not read yet (pipelining): 0 or 1 where a step
    is planned, 2 between the launch of the next step and the reading of the last."""
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0
    num_disk_tokens: int = 0
    """How many of those the disk tier brought for it."""
    num_in_flight_tokens: int = 0
    """How many of those another sequence computed while this one waited for them."""
    loaded_span: tuple[int, int] = (0, 0)
    """Tokens [start, end) that the disk tier brought into the prefix cache for it."""
    arrival_s: float = 0.0
    """On the scheduler's clock."""
    constraint: TokenConstraint | None = None
    """For a job with a response format. Its tokens must be read before the next is sampled."""
    readout: Readout | None = None
    """What is still to be read off the prompt."""
    runs_alone: bool = False
    """After a strike: no other row beside it until its first new token."""
    status: SequenceStatus = SequenceStatus.WAITING
    cache_node: Any = None
    """The deepest prefix-cache node that this sequence has pinned; the scheduler's."""

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self.job.prompt_token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Tokens sampled so far, read back or not."""
        return len(self.output_token_ids) + self.num_unread_tokens

    @property
    def num_tokens(self) -> int:
        """Prompt and output together, read back or not."""
        return self.num_prompt_tokens + self.num_output_tokens

    @property
    def num_known_tokens(self) -> int:
        """Tokens whose values the host knows."""
        return self.num_prompt_tokens + len(self.output_token_ids)

    @property
    def num_pending_tokens(self) -> int:
        """Tokens still without keys and values."""
        return self.num_tokens - self.num_computed_tokens

    @property
    def num_remaining_tokens(self) -> int:
        """Tokens that max_tokens still allows to be sampled."""
        return self.job.max_tokens - self.num_output_tokens

    @property
    def max_reused_tokens(self) -> int:
        """Tokens that a cache may stand in for; the last known one is computed in any case."""
        most = self.num_known_tokens - 1
        return most if self.readout is None else min(most, self.readout.first_position)

    @property
    def ends_with_prompt(self) -> bool:
        """Whether it generates nothing: it is done when its prompt has been read."""
        return self.readout is not None and not self.readout.precedes_generation

    @property
    def needs_logits(self) -> bool:
        """Whether the logits of more than its last token are read."""
        return self.readout is not None and bool(self.readout.targets)

    @property
    def is_finished(self) -> bool:
        """Whether no more work is due for it."""
        return self.status is SequenceStatus.FINISHED

    def tokens(self, start: int, end: int) -> list[int]:
        """Return the values of tokens [start, end), which must be known to the host."""
        if not 0 <= start <= end <= self.num_known_tokens:
            raise IndexError(f"tokens [{start}, {end}) of {self.num_known_tokens} known")
        prompt = self.job.prompt_token_ids
        head = prompt[start:end]
        if end <= len(prompt):
            return list(head)
        skip = max(0, start - len(prompt))
        return [*head, *self.output_token_ids[skip : end - len(prompt)]]


class ScheduledSequence(NamedTuple):
    """A sequence and how many of its pending tokens to compute in this step."""

    sequence: Sequence
    num_tokens: int


class TokenLogprobs(NamedTuple):
    """Logprobs at the position of one sampled token."""

    logprob: float
    """The sampled token's."""
    top_ids: list[int]
    """The likeliest tokens, in descending order."""
    top_logprobs: list[float]


class TokenOutput(NamedTuple):
    """A sampled token, read back."""

    sequence: Sequence
    token_id: int
    logprobs: TokenLogprobs | None = None
    """For a job that asks for them."""


class PromptReading(NamedTuple):
    """Logprobs of some prompt tokens, read off the prompt of a sequence that goes on."""

    sequence: Sequence
    first_position: int
    """The first of these is the logprob of the token behind this position."""
    logprobs: list[TokenLogprobs]
    is_finite: bool = True


class Reading(NamedTuple):
    """What was read off the prompt of a sequence with a readout."""

    sequence: Sequence
    logprobs: tuple[float, ...] = ()
    """Of each target."""
    is_greedy: bool = False
    """Whether each target is the likeliest token at its place."""
    vector: bytes = b""
    """An embedding, little-endian float32."""
    is_finite: bool = True
