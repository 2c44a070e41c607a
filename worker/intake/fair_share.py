"""FairShare: which queue the next job is claimed from. Policy only: no redis, no clock."""

from collections.abc import Iterable
from typing import NamedTuple

from headwater.schemas import Priority
from headwater.schemas.keys import PRIORITIES

_RANKS = {priority.value: rank for rank, priority in enumerate(PRIORITIES)}


class QueueId(NamedTuple):
    """The parts of a queue's name."""

    name: str
    rank: int
    """Of its priority class, the most urgent first."""
    namespace: str

    @classmethod
    def parse(cls, name: str, model: str) -> "QueueId | None":
        """Return the parts of a queue that holds jobs for *model*, None for any other name."""
        alias, _, rest = name.partition(".")
        priority, _, namespace = rest.partition(".")
        if alias != model or priority not in _RANKS or not namespace:
            return None
        return cls(name, _RANKS[Priority(priority)], namespace)


class FairShare:
    """Orders queues by class, with aging, and within a class by what their namespaces got.

    A namespace pays for each job with its tokens. The one that has paid least comes next; one
    that comes back from a pause starts level with those that stayed, so nothing is saved up.
    A queue that waits longer than *max_wait_s* while higher classes are served comes first.
    """

    def __init__(self, max_wait_s: float) -> None:
        self._max_wait_s = max_wait_s
        self._paid: dict[str, float] = {}
        self._waits_since: dict[str, float] = {}

    def order(self, queues: Iterable[QueueId], now: float) -> list[QueueId]:
        """Return the non-empty *queues* in the order in which to try them."""
        waiting = list(queues)
        self._note_waits(waiting, now)
        self._level({queue.namespace for queue in waiting})
        return sorted(waiting, key=lambda queue: self._place(queue, now))

    def claimed(self, queue: QueueId, num_tokens: int) -> None:
        """Note that a job of so many tokens was claimed from *queue*."""
        self._paid[queue.namespace] = self._paid.get(queue.namespace, 0.0) + num_tokens
        self._waits_since.pop(queue.name, None)

    def _place(self, queue: QueueId, now: float) -> tuple[int, float, float]:
        since = self._waits_since[queue.name]
        if now - since > self._max_wait_s:
            return (-1, since, 0.0)
        return (queue.rank, self._paid[queue.namespace], since)

    def _note_waits(self, waiting: list[QueueId], now: float) -> None:
        known = self._waits_since
        self._waits_since = {queue.name: known.get(queue.name, now) for queue in waiting}

    def _level(self, namespaces: set[str]) -> None:
        """Forget namespaces without work; let new ones start at the least that others paid."""
        stayed = {name: paid for name, paid in self._paid.items() if name in namespaces}
        level = min(stayed.values(), default=0.0)
        self._paid = {name: stayed.get(name, level) for name in namespaces}
