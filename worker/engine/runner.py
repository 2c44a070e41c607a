"""The contract between the engine and whatever holds the keys and values of running rows.

Three implementations: attention over shared prefixes stored once, mlx-lm's batch caches, and
rows one at a time. All give the same tokens; a model gets the fastest that its parity check
lets it have.
"""

from collections.abc import Sequence as Seq
from typing import Final, NamedTuple, Protocol

import mlx.core as mx
from mlx_lm.models.cache import KVCache

from ..allocation import Allocation
from ..segment import CacheKind, Segment
from ..sequence import Sequence
from .prefill_reader import PrefillReader

__all__ = ["CacheKind", "DeviceSegment", "ModelRunner", "Padding", "Segment"]


class DeviceSegment(Segment, Protocol):
    """A segment as runners make them."""

    @property
    def arrays(self) -> list[mx.array]:
        """The arrays held, which may be lazy: evaluating them makes the copy."""
        ...


class Padding(NamedTuple):
    """What a runner holds and computes, in tokens, and how much of it is for none."""

    num_held: int
    """That fit into the memory of rows' own keys and values, now."""
    num_used: int
    """That lie there."""
    num_prefilled: int
    """That prefills have computed so far, pads included."""
    num_pads: int
    """Of those, pads."""

    @property
    def kv_share(self) -> float:
        """Padding over all that is held."""
        return 1 - self.num_used / max(1, self.num_held, self.num_used)

    @property
    def prefill_share(self) -> float:
        """Pads over all that prefills have computed."""
        return self.num_pads / max(1, self.num_prefilled)


MLX_LM_ALLOCATION: Final = Allocation(page_tokens=KVCache.step, tail_tokens=KVCache.step)
"""Of rows in mlx-lm's caches."""


class ModelRunner(Protocol):
    """Keys and values of the running sequences, and the forwards over them.

    Called by the engine thread only. Rows are named by their Sequence. Nothing is evaluated
    here: every result is lazy, and a row may be detached while a launched step still reads it.
    """

    cache_kind: CacheKind
    shares_prefix: bool
    """Whether rows refer to the segments of their prefix instead of copying them."""
    allocation: Allocation

    @property
    def nbytes(self) -> int:
        """Bytes held by the rows themselves, capacity included, shared prefixes excluded."""
        ...

    @property
    def padding(self) -> Padding | None:
        """What is padding; None where the runner leaves them to mlx-lm's caches."""
        ...

    def attach(self, sequence: Sequence, prefix: Seq[Segment]) -> None:
        """Give *sequence* a row that starts with *prefix* (adjacent segments from token 0)."""
        ...

    def detach(self, sequence: Sequence) -> None:
        """Drop the row and its memory; unknown sequences are ignored."""
        ...

    @property
    def reads_states(self) -> bool:
        """Whether a reader of prefills is given the last layer's states."""
        ...

    def prefill(
        self,
        rows: Seq[Sequence],
        chunks: Seq[Seq[int]],
        reader: PrefillReader | None = None,
    ) -> mx.array:
        """Compute the next *chunks* (token values) of *rows*, and let *reader* see them.

        Returns the logits after each row's last token, shape (len(rows), vocabulary).
        """
        ...

    def decode(self, rows: Seq[Sequence], tokens: mx.array) -> mx.array:
        """Compute one token a row; *tokens* has shape (len(rows),) and may be lazy.

        Returns logits of shape (len(rows), vocabulary) in the order of *rows*.
        """
        ...

    def prefill_and_decode(
        self,
        rows: Seq[Sequence],
        chunks: Seq[Seq[int]],
        decoding: Seq[Sequence],
        tokens: mx.array,
    ) -> mx.array:
        """Do both, in one forward where the model allows it.

        Returns the logits of *rows*, then those of *decoding*.
        """
        ...

    def state(self, rows: Seq[Sequence]) -> list[mx.array]:
        """Return the arrays that *rows* live in, for the engine to evaluate with a step.

        Without it the graph of chunks whose logits nobody reads would grow for ever.
        """
        ...

    def extract(self, sequence: Sequence, start: int, end: int) -> DeviceSegment:
        """Return a copy of the row's tokens [start, end).

        With SNAPSHOTS *end* must be what the row has computed: the segment holds the state there.
        """
        ...

    def rebase(self, sequence: Sequence, prefix: Seq[Segment]) -> None:
        """Note that *prefix* now holds the row's first tokens.

        A runner that stores shared prefixes once drops its own copy of them; others do nothing.
        """
        ...


def prefill_then_decode(
    runner: ModelRunner,
    rows: Seq[Sequence],
    chunks: Seq[Seq[int]],
    decoding: Seq[Sequence],
    tokens: mx.array,
) -> mx.array:
    """Do what prefill_and_decode() says in two forwards, for runners that can't join them."""
    return mx.concatenate([runner.prefill(rows, chunks), runner.decode(decoding, tokens)])
