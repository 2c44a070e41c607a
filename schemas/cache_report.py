"""CacheReport: what a worker holds of computed prefixes; CacheClear: the wish that it lets go."""

from pydantic import Field

from .base import WireModel
from .events import CachedTokens

MAX_TOP_PREFIXES = 20
"""In one report, so that it stays small whatever the cache holds."""


class TopPrefix(WireModel):
    """A prefix in memory that saved work. Neither its text nor its tokens leave the worker."""

    hash: str
    """Of model, namespace and tokens; the disk tier names its files by the same one."""
    namespace: str
    num_tokens: int = Field(ge=1)
    num_hits: int = Field(ge=1)
    """Times that a sequence went on exactly at its end."""
    saved_tokens: int = Field(ge=1)
    """Tokens that were not computed for that."""


class MemoryCache(WireModel):
    """The prefix cache."""

    nbytes: int = Field(ge=0)
    pinned_nbytes: int = Field(ge=0)
    """Of these, what running jobs use: it can't be let go now."""
    rows_nbytes: int = Field(ge=0)
    """Keys and values of running rows, which share the budget."""
    budget_nbytes: int | None = None
    """For both; None is unlimited."""
    num_nodes: int = Field(ge=0)
    num_hits: int = Field(ge=0)
    num_evicted_nodes: int = Field(ge=0)


class DiskCache(WireModel):
    """The disk tier."""

    nbytes: int = Field(ge=0)
    """In the directory, files of other models included."""
    budget_nbytes: int = Field(ge=0)
    num_entries: int = Field(ge=0)
    """Of the worker's model."""
    is_off: bool = False
    """Whether the disk failed."""


class ClearOutcome(WireModel):
    """What came of a wish."""

    clear_id: str
    memory_freed_nbytes: int = Field(default=0, ge=0)
    disk_removed_entries: int = Field(default=0, ge=0)


class CacheReport(WireModel):
    """The value under `cache_report_key(worker_id)`, as old as the worker's last heartbeat."""

    prompt_tokens: int = Field(default=0, ge=0)
    """Of all prefills since the worker's start."""
    cached: CachedTokens = CachedTokens()
    """Of these, what was not computed, by where it was."""
    memory: MemoryCache
    disk: DiskCache | None = None
    """None without a disk tier."""
    top: tuple[TopPrefix, ...] = Field(default=(), max_length=MAX_TOP_PREFIXES)
    """The prefixes in memory that saved most, in that order."""
    last_clear: ClearOutcome | None = None

    @property
    def hit_share(self) -> float:
        """Share of the prompt tokens that was not computed."""
        num_cached = self.cached.memory + self.cached.disk + self.cached.in_flight
        return num_cached / self.prompt_tokens if self.prompt_tokens else 0.0


class CacheClear(WireModel):
    """The value under `cache_clear_key(worker_id)`: the wish that the worker empties its caches."""

    clear_id: str
    memory: bool = True
    disk: bool = True
