"""CacheControl: shows what the caches hold and empties them, on the engine thread."""

import time
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from typing import Any, Final

import structlog
from headwater.schemas import (
    CacheClear,
    CacheReport,
    ClearOutcome,
    DiskCache,
    MemoryCache,
    TopPrefix,
)
from headwater.schemas.cache_report import MAX_TOP_PREFIXES

from .cold_prefixes import ColdPrefixes
from .disk_tier import PrefixKeys
from .engine.engine import Engine
from .figures import Figures
from .prefix_cache import SavingPrefix, tokens_to
from .scheduler import Scheduler

log = structlog.get_logger()

_PERIOD_S: Final = 1.0
_LEAST_PERIODS: Final = 50
"""A report takes at most one part in so many of the engine's time, however large the cache is."""


class CacheControl:
    """Writes reports now and then, and carries out wishes to clear.

    What running jobs use stays: it can be let go when they have ended.
    """

    def __init__(
        self,
        scheduler: Scheduler[Any],
        cold: ColdPrefixes | None,
        engine: Engine,
        figures: Figures,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._cache = scheduler.cache
        self._max_bytes = scheduler.max_bytes
        self._cold = cold
        self._engine = engine
        self._figures = figures
        self._clock = clock
        self._hashes: dict[int, tuple[Any, str]] = {}
        """Of the nodes in the last report, by id, with the node, which keeps the id taken."""
        self._last_clear: ClearOutcome | None = None
        self._clearing: tuple[ClearOutcome, Future[None]] | None = None
        """What will be the last one when the disk has done its part."""
        self._due_s = clock()
        self.report = self._make()
        """The last one; may be read from any thread."""

    def refresh(self) -> None:
        """Make a new report if the last one is old."""
        began_s = self._clock()
        has_cleared = self._clearing is not None and self._clearing[1].done()
        if began_s < self._due_s and not has_cleared:
            return
        if self._clearing is not None and has_cleared:
            self._last_clear, self._clearing = self._clearing[0], None
        self.report = self._make()
        ended_s = self._clock()
        self._due_s = ended_s + max(_PERIOD_S, _LEAST_PERIODS * (ended_s - began_s))

    def clear(self, wish: CacheClear) -> None:
        """Empty what *wish* names; a report tells of it when that is done."""
        freed = self._cache.evict(self._cache.nbytes) if wish.memory else 0
        removed, done = 0, Future[None]()
        if wish.disk and self._cold is not None:
            removed, done = self._cold.tier.num_entries, self._cold.clear()
        else:
            done.set_result(None)
        log.info("caches_cleared", memory_nbytes=freed, disk_entries=removed)
        outcome = ClearOutcome(
            clear_id=wish.clear_id, memory_freed_nbytes=freed, disk_removed_entries=removed
        )
        self._clearing = outcome, done
        self.refresh()

    def _make(self) -> CacheReport:
        return CacheReport(
            prompt_tokens=self._figures.num_prompt_tokens,
            cached=self._figures.cached,
            memory=self._memory(),
            disk=None if self._cold is None else _disk(self._cold),
            top=self._top(),
            last_clear=self._last_clear,
        )

    def _memory(self) -> MemoryCache:
        cache = self._cache
        return MemoryCache(
            nbytes=cache.nbytes,
            pinned_nbytes=cache.pinned_nbytes,
            rows_nbytes=self._engine.nbytes,
            budget_nbytes=self._max_bytes,
            num_nodes=cache.num_nodes,
            num_hits=cache.statistics.num_hits,
            num_evicted_nodes=cache.statistics.num_evicted_nodes,
        )

    def _top(self) -> tuple[TopPrefix, ...]:
        found = self._cache.most_saving(MAX_TOP_PREFIXES)
        self._hashes = {id(each.node): (each.node, self._hash(each)) for each in found}
        return tuple(
            TopPrefix(
                hash=self._hashes[id(each.node)][1],
                namespace=_namespace(each.root_key),
                num_tokens=each.node.end,
                num_hits=each.node.num_hits,
                saved_tokens=each.num_saved_tokens,
            )
            for each in found
        )

    def _hash(self, prefix: SavingPrefix) -> str:
        # A node's tokens from the first one on never change, only how the path is cut.
        known = self._hashes.get(id(prefix.node))
        if known is not None:
            return known[1]
        tokens = tokens_to(prefix.node)
        root = " ".join(map(str, _parts(prefix.root_key)))
        fingerprint = "" if self._cold is None else self._cold.tier.fingerprint
        return PrefixKeys(fingerprint, root, tokens).at([len(tokens)])[len(tokens)]


def _disk(cold: ColdPrefixes) -> DiskCache:
    tier = cold.tier
    return DiskCache(
        nbytes=tier.nbytes,
        budget_nbytes=tier.max_bytes,
        num_entries=tier.num_entries,
        is_off=tier.is_off,
    )


def _parts(root_key: Hashable) -> tuple[Any, ...]:
    assert isinstance(root_key, tuple)
    return root_key


def _namespace(root_key: Hashable) -> str:
    return str(_parts(root_key)[-1])
