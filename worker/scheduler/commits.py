"""CommitPlanner: which computed tokens go into the prefix cache, and when."""

from typing import Generic, TypeVar

from ..prefix_cache import Node, PrefixCache
from ..segment import CacheKind, Segment
from .memory import MemoryPlanner
from .placement import Placement
from .plan import Commit

S = TypeVar("S", bound=Segment)


class CommitPlanner(Generic[S]):
    """A row's keys and values are kept at its end, and before that where somebody waits for them.

    What nobody shares is cheaper to attend over while it is the row's own. A row whose state
    can't be cut later leaves one on its way: at every multiple of *snapshot_stride*, and before
    the last token of its prompt, where an identical prompt goes on. With *keeps_prompts* prompts
    are kept there as soon as they are computed, whatever the model: a disk tier wants them early.
    Nothing is kept that does not fit into the budget beside the rows.
    """

    def __init__(
        self,
        cache: PrefixCache[S],
        memory: MemoryPlanner[S],
        snapshot_stride: int,
        *,
        keeps_prompts: bool,
    ) -> None:
        self._cache = cache
        self._snapshot_stride = snapshot_stride
        self._keeps_prompts = keeps_prompts or not self._is_cuttable
        self._memory = memory
        self._pins: list[Node[S]] = []

    def expect_prompt(self, placement: Placement) -> None:
        """Plan the commit of a prompt that is about to be computed."""
        start, end = (
            placement.sequence.num_computed_tokens,
            placement.sequence.num_prompt_tokens - 1,
        )
        if not self._is_cuttable:
            stride = self._snapshot_stride
            for position in range((start // stride + 1) * stride, end, stride):
                placement.add_boundary(position)
        if end > start and self._keeps_prompts:
            placement.add_boundary(end)

    def due(self, placement: Placement, num_computed: int) -> list[Commit]:
        """Return the commits at the boundaries reached with *num_computed* tokens."""
        reached = [end for end in placement.boundaries if end <= num_computed]
        placement.boundaries = [end for end in placement.boundaries if end > num_computed]
        return self._plan(placement, reached) if reached else []

    def last(self, placement: Placement) -> list[Commit]:
        """Return the commit of a row that is about to go."""
        sequence = placement.sequence
        end = min(sequence.num_computed_tokens, sequence.num_known_tokens)
        is_reachable = self._is_cuttable or sequence.num_computed_tokens == end
        return self._plan(placement, [end]) if end and is_reachable else []

    @property
    def has_pins(self) -> bool:
        """Whether planned commits still keep something pinned."""
        return bool(self._pins)

    def release_pins(self) -> None:
        """Let go of what planned commits build on, when they have been carried out."""
        for node in self._pins:
            self._cache.unpin(node)
        self._pins.clear()

    def keep_until_done(self, node: Node[S] | None) -> None:
        """Take over a row's pin until the planned commits have been carried out."""
        if node is not None:
            self._pins.append(node)

    @property
    def _is_cuttable(self) -> bool:
        return self._cache.kind is CacheKind.SEGMENTS

    def _plan(self, placement: Placement, ends: list[int]) -> list[Commit]:
        sequence = placement.sequence
        tokens = tuple(sequence.tokens(0, ends[-1]))
        held = self._cache.match(placement.root_key, tokens, len(tokens))
        if held.node is not None:
            self._cache.pin_node(held.node)
            self._pins.append(held.node)
        position = held.num_tokens
        commits = []
        for end in ends:
            if end > position and self._memory.plan_commit(position, end):
                commits.append(Commit(sequence, position, end))
                position = end
        return commits
