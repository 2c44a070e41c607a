"""Rows: the sequences that have a row, what their rows rest on, and what they leave behind."""

from collections.abc import Iterator
from typing import Generic, TypeVar

from ..prefix_cache import Node, PrefixCache
from ..segment import Segment
from ..sequence import Sequence, SequenceStatus
from .commits import CommitPlanner
from .memory import MemoryPlanner
from .placement import Placement, Stage
from .plan import Commit, RowPrefix
from .settings import SchedulerSettings

S = TypeVar("S", bound=Segment)


class Rows(Generic[S]):
    """Running sequences in the order of their admission."""

    def __init__(self, cache: PrefixCache[S], settings: SchedulerSettings) -> None:
        self.memory = MemoryPlanner(cache, settings)
        self._cache = cache
        self._commits = CommitPlanner(
            cache,
            self.memory,
            settings.snapshot_stride,
            keeps_prompts=settings.keeps_prompts,
        )
        self._running: dict[Placement, None] = {}
        self._unsound: list[Placement] = []
        """Gone; what they put into the cache leaves it when no plan builds on it any more."""
        self._num_splits = 0
        """Cuts of shared segments that the rows know of."""

    def __len__(self) -> int:
        return len(self._running)

    def __iter__(self) -> Iterator[Placement]:
        return iter(self._running)

    def __contains__(self, placement: object) -> bool:
        return placement in self._running

    @property
    def has_leftovers(self) -> bool:
        """Whether something of rows that are gone is still to be cleared up."""
        return bool(self._unsound) or self._commits.has_pins

    def settle(self) -> None:
        """Clear up behind the last plan, which has been carried out by now."""
        self._commits.release_pins()
        for failed in self._unsound:
            num_cached = failed.sequence.num_cached_tokens
            self._cache.discard(failed.root_key, failed.tokens, num_cached)
        self._unsound.clear()

    def begin(self, num_prefill_tokens: int, held_nbytes: int) -> None:
        """Start the plan of a step that computes so many prompt tokens at most.

        The engine holds *held_nbytes* of the rows.
        """
        running = (placement.sequence for placement in self)
        self.memory.begin(running, num_prefill_tokens, held_nbytes)

    def next_victim(self) -> Placement:
        """Return who has to go first: of the lowest class, the youngest."""
        return max(self, key=lambda placement: (placement.rank, placement.order))

    def start(self, placement: Placement, node: Node[S] | None) -> RowPrefix[S]:
        """Give a row to a sequence that has pinned *node*; return what the row starts with."""
        sequence = placement.sequence
        sequence.cache_node = node
        sequence.num_cached_tokens = node.end if node else 0
        _tell_sources(placement)
        sequence.num_computed_tokens = sequence.num_cached_tokens
        sequence.status = SequenceStatus.RUNNING
        placement.stage = Stage.RUNNING
        self._running[placement] = None
        self._commits.expect_prompt(placement)
        self.memory.add_row(sequence)
        self.memory.evict()
        row = self._row_prefix(placement)
        if not self.memory.shares_prefix:
            # From now on it has a copy; the memory of two is not spent under pressure.
            self._let_go(sequence)
        return row

    def stop(self, placement: Placement, *, is_sound: bool) -> list[Commit]:
        """Take the row from a sequence; return the commits that save its keys and values."""
        del self._running[placement]
        self.memory.remove_row(placement.sequence)
        commits = self._commits.last(placement) if is_sound else []
        if not is_sound:
            self._unsound.append(placement)
        self._let_go(placement.sequence)
        return commits

    def due(self, placement: Placement, num_tokens: int) -> list[Commit]:
        """Return the commits of a row that computes so many tokens in this step."""
        if not placement.boundaries:
            return []
        return self._commits.due(placement, placement.sequence.num_computed_tokens + num_tokens)

    def committed(self, placement: Placement, node: Node[S]) -> list[S]:
        """Let a row rest on *node*; return its segments, none if the row has its own copy."""
        if not self.memory.shares_prefix:
            return []
        self._cache.pin_node(node)
        self._cache.unpin(placement.sequence.cache_node)
        placement.sequence.cache_node = node
        return self._row_prefix(placement).prefix

    def cut(self) -> list[RowPrefix[S]]:
        """Return the rows whose segments were cut: whoever joins them shares the pieces."""
        num_splits = self._cache.statistics.num_splits
        if not self.memory.shares_prefix or self._num_splits == num_splits:
            return []
        self._num_splits = num_splits
        known = [(placement.num_prefix_segments, self._row_prefix(placement)) for placement in self]
        return [row for num_segments, row in known if len(row.prefix) != num_segments]

    def _row_prefix(self, placement: Placement) -> RowPrefix[S]:
        prefix = self._cache.segments(placement.sequence.cache_node)
        placement.num_prefix_segments = len(prefix)
        return RowPrefix(placement.sequence, prefix)

    def _let_go(self, sequence: Sequence) -> None:
        self._commits.keep_until_done(sequence.cache_node)
        sequence.cache_node = None


def _tell_sources(placement: Placement) -> None:
    """Note where the cached tokens of a sequence that gets a row come from."""
    sequence = placement.sequence
    num_cached = sequence.num_cached_tokens
    start, end = sequence.loaded_span
    sequence.num_disk_tokens = max(0, min(num_cached, end) - start)
    held = placement.num_held_when_parked
    sequence.num_in_flight_tokens = 0 if held is None else max(0, num_cached - max(held, end))
