"""Leaders: which prompts are being computed now, and who waits for a part of one."""

from collections.abc import Iterable
from typing import NamedTuple

from ..prefix_cache import shared_length
from ..segment import CacheKind
from .placement import Placement, Stage


class Shared(NamedTuple):
    """A prompt in the making, and how much of it somebody else can use."""

    leader: Placement
    num_tokens: int


class Leaders:
    """Every running sequence leads while its prompt is not all in the prefix cache.

    Where a prompt can't be cut later, it leads only while it computes that. A taker parks behind
    the leader that shares most with it, and the leader gets a boundary there. A taker is free
    again when that part is committed, or when the leader leads no more.
    """

    def __init__(self, kind: CacheKind, min_shared_tokens: int) -> None:
        self._kind = kind
        self._min_shared_tokens = min_shared_tokens
        self._leaders: dict[Placement, None] = {}
        self.num_parked = 0

    def __contains__(self, placement: Placement) -> bool:
        return placement in self._leaders

    def add(self, placement: Placement, successors: Iterable[Placement]) -> None:
        """Let a sequence lead that has just got a row, *successors* being next in trie order.

        A whole state has to be taken in passing, so those who are to come count already.
        """
        self._leaders[placement] = None
        if self._kind is CacheKind.SEGMENTS:
            return
        for successor in successors:
            shared = self._shared_length(placement, successor)
            if shared - placement.sequence.num_computed_tokens < self._min_shared_tokens:
                break
            placement.add_boundary(shared)

    def find(self, taker: Placement, num_cached_tokens: int) -> Shared | None:
        """Return the leader worth waiting for, given what the cache has already."""
        best = Shared(taker, num_cached_tokens + self._min_shared_tokens - 1)
        for leader in self._leaders:
            shared = self._shared_length(leader, taker)
            if shared > best.num_tokens and self._can_commit(leader, shared):
                best = Shared(leader, shared)
        return None if best.leader is taker else best

    def park(self, taker: Placement, shared: Shared) -> None:
        """Let *taker* wait for the shared part."""
        taker.stage = Stage.PARKED
        taker.leader, taker.awaited_end = shared
        shared.leader.takers.append(taker)
        shared.leader.add_boundary(shared.num_tokens)
        self.num_parked += 1

    def leave(self, taker: Placement) -> None:
        """Take out a parked sequence that was cancelled."""
        assert taker.leader is not None
        taker.leader.takers.remove(taker)
        self._free([taker])
        taker.stage = Stage.GONE

    def committed(self, leader: Placement, end: int) -> list[Placement]:
        """Free and return the takers that needed no more than [0, *end*)."""
        freed = [taker for taker in leader.takers if taker.awaited_end <= end]
        leader.takers = [taker for taker in leader.takers if taker.awaited_end > end]
        return self._free(freed)

    def remove(self, leader: Placement) -> list[Placement]:
        """End a sequence's lead; free and return all who still waited for it."""
        self._leaders.pop(leader, None)
        leader.boundaries.clear()
        freed, leader.takers = leader.takers, []
        return self._free(freed)

    def done(self) -> list[Placement]:
        """Return the leaders that have nothing more to give, or were not let give it."""
        return [leader for leader in self._leaders if self._is_done(leader)]

    def _is_done(self, leader: Placement) -> bool:
        sequence = leader.sequence
        if sequence.num_computed_tokens < len(leader.tokens):
            return False
        if self._kind is CacheKind.SNAPSHOTS:
            return True
        node = sequence.cache_node
        if node is not None and node.end >= sequence.num_prompt_tokens - 1:
            return True
        # A commit that memory has no room for, or that failed, frees nobody.
        return any(taker.awaited_end not in leader.boundaries for taker in leader.takers)

    def _shared_length(self, leader: Placement, taker: Placement) -> int:
        """Tokens of *leader* that *taker* can use."""
        if leader.root_key != taker.root_key:
            return 0
        most = taker.sequence.max_reused_tokens
        return min(shared_length(leader.tokens, taker.tokens), most)

    def _can_commit(self, leader: Placement, end: int) -> bool:
        # A row's state is only there at the moment when it stands at its end.
        return self._kind is CacheKind.SEGMENTS or leader.sequence.num_computed_tokens < end

    def _free(self, takers: Iterable[Placement]) -> list[Placement]:
        freed = list(takers)
        for taker in freed:
            taker.leader = None
            taker.stage = Stage.WAITING
        self.num_parked -= len(freed)
        return freed
