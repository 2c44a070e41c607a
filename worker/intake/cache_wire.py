"""CacheWire: tells Redis what the caches hold, and hears of wishes to clear them."""

from collections.abc import Callable
from typing import Any, Final

import structlog
from headwater.schemas import CacheClear, CacheReport, SchemaError, keys

log = structlog.get_logger()

_HURRY_S: Final = 0.25
"""Until the next heartbeat, while somebody waits to be told that the caches are empty."""


class CacheWire:
    """Rides on the heartbeats: two commands more, no trip of its own."""

    def __init__(
        self,
        worker_id: str,
        *,
        report: Callable[[], CacheReport],
        post: Callable[[CacheClear], None],
    ) -> None:
        """*post* hands a wish to the engine, which tells of it in its next report."""
        self._report_key = keys.cache_report_key(worker_id)
        self._clear_key = keys.cache_clear_key(worker_id)
        self._report = report
        self._post = post
        self._asked: str | None = None
        """The last wish that the engine was told of."""
        self._sent: str | None = None
        """The last wish whose outcome is in the report that is under way."""
        self._told: str | None = None
        """The last wish whose outcome Redis knows."""

    @property
    def names(self) -> tuple[str, ...]:
        """Keys that go with the worker."""
        return self._report_key, self._clear_key

    def speak(self, pipeline: Any, ttl_ms: int) -> None:
        """Add the commands to a heartbeat; hear() wants the reply to the last one."""
        report = self._report()
        self._sent = report.last_clear.clear_id if report.last_clear else None
        pipeline.set(self._report_key, report.encode(), px=ttl_ms)
        pipeline.get(self._clear_key)

    def hear(self, wish: bytes | None) -> None:
        """Hand a wish on, once."""
        self._told = self._sent
        if wish is None:
            return
        try:
            clear = CacheClear.decode(wish)
        except SchemaError as error:
            log.warning("not_a_wish", key=self._clear_key, error=str(error))
            return
        if clear.clear_id not in (self._asked, self._told):
            self._asked = clear.clear_id
            self._post(clear)

    def next_beat_s(self, usual_s: float) -> float:
        """Return when the next heartbeat should come."""
        return min(_HURRY_S, usual_s) if self._asked != self._told else usual_s
