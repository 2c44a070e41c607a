"""WaitingQueue: priority classes with aging, each in the order of the trie of its prompts."""

import heapq
from collections import deque
from collections.abc import Iterable, Iterator

from .placement import RANKS, Placement, Stage


class WaitingQueue:
    """Sequences without a row.

    A class is emptied in waves: its oldest *lookahead* sequences, sorted by namespace and
    tokens. That is the depth-first order of the trie of their prompts, so those who share a
    prefix come together, and nobody is overtaken by more than a wave of its class.
    A sequence that left by another door (cancelled) is skipped when its turn comes.
    """

    def __init__(self, max_wait_s: float, lookahead: int) -> None:
        self._max_wait_s = max_wait_s
        self._classes = [_PriorityClass(lookahead) for _ in RANKS]

    def __len__(self) -> int:
        return sum(one.num_waiting for one in self._classes)

    def push(self, placement: Placement) -> None:
        """Add a sequence behind its class."""
        placement.stage = Stage.WAITING
        self._classes[placement.rank].push(placement)

    def push_front(self, placements: Iterable[Placement]) -> None:
        """Put back sequences that had their turn already, before all others of their class."""
        for placement in reversed(list(placements)):
            placement.stage = Stage.WAITING
            self._classes[placement.rank].push_front(placement)

    def pop(self, now: float) -> Placement | None:
        """Take the next sequence, or None. It must be put somewhere else or back."""
        waiting = [one for one in self._classes if one.num_waiting]
        if not waiting:
            return None
        oldest = min(waiting, key=_PriorityClass.oldest_arrival_s)
        is_aged = now - oldest.oldest_arrival_s() >= self._max_wait_s
        return (oldest if is_aged else waiting[0]).pop()

    def successors(self, placement: Placement) -> Iterator[Placement]:
        """Yield those of its class whose turn comes next, in trie order."""
        return self._classes[placement.rank].next_in_wave()

    def forget(self, placement: Placement) -> None:
        """Take out a waiting sequence that was cancelled."""
        placement.stage = Stage.GONE
        self._classes[placement.rank].num_waiting -= 1


class _PriorityClass:
    def __init__(self, lookahead: int) -> None:
        self.num_waiting = 0
        self._lookahead = lookahead
        self._later: deque[Placement] = deque()
        self._wave: deque[Placement] = deque()
        self._arrivals: list[tuple[float, int, Placement]] = []

    def push(self, placement: Placement) -> None:
        self._later.append(placement)
        self._list(placement)

    def push_front(self, placement: Placement) -> None:
        self._wave.appendleft(placement)
        self._list(placement)

    def pop(self) -> Placement:
        while True:
            if not self._wave:
                self._start_wave()
            placement = self._wave.popleft()
            if placement.stage is Stage.WAITING:
                self.num_waiting -= 1
                return placement

    def next_in_wave(self) -> Iterator[Placement]:
        return (placement for placement in self._wave if placement.stage is Stage.WAITING)

    def oldest_arrival_s(self) -> float:
        """When the oldest waiting sequence arrived; there must be one."""
        while self._arrivals[0][2].stage is not Stage.WAITING:
            heapq.heappop(self._arrivals)[2].is_listed = False
        return self._arrivals[0][0]

    def _list(self, placement: Placement) -> None:
        self.num_waiting += 1
        if not placement.is_listed:
            placement.is_listed = True
            arrival = (placement.sequence.arrival_s, placement.order, placement)
            heapq.heappush(self._arrivals, arrival)

    def _start_wave(self) -> None:
        wave: list[Placement] = []
        while self._later and len(wave) < self._lookahead:
            placement = self._later.popleft()
            if placement.stage is Stage.WAITING:
                wave.append(placement)
        wave.sort(key=_trie_order)
        self._wave.extend(wave)


def _trie_order(placement: Placement) -> tuple[str, str, tuple[int, ...]]:
    job = placement.sequence.job
    return job.namespace, job.adapter or "", placement.tokens
