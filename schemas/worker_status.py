"""WorkerStatus: what a worker's lease says about it, for `headwater status` and dashboards."""

from pydantic import Field

from .base import WireModel


class WorkerStatus(WireModel):
    """The value under `worker_key(worker_id)`; the key's expiry is the lease."""

    worker_id: str
    alias: str = ""
    """The model alias that it serves."""
    source: str = ""
    """The directory or hub name that it loaded."""
    pid: int = 0
    host: str = ""
    started_at: float = 0.0
    """Unix seconds."""
    at_ms: int = 0
    """Redis' time of this heartbeat, Unix milliseconds."""
    batch: int = Field(default=0, ge=0)
    """Sequences that run now."""
    waiting: int = Field(default=0, ge=0)
    """Sequences claimed and not running."""
    tokens_per_s: float = Field(default=0.0, ge=0)
    """Tokens generated per second, over the last seconds."""
    cache_hit_share: float = Field(default=0.0, ge=0, le=1)
    """Prompt tokens that were reused, of all prompt tokens since the start."""
    draining: bool = False
