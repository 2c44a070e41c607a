"""Station: the worker's Redis side in one place: publisher, intake, heartbeat, maintenance."""

import time
from collections.abc import Callable

from headwater.schemas import CacheReport, Priority, WorkerStatus, keys

from .booking.rq_jobs import RQBook
from .engine.sampler import SAMPLER_VERSION
from .intake.cache_wire import CacheWire
from .intake.heartbeat import Heartbeat
from .intake.intake import Intake
from .intake.listener import Listener
from .intake.maintenance import Maintenance
from .intake.registration import Registration
from .intake.settings import IntakeSettings
from .messages import Message
from .metrics import WorkerMetrics
from .outages import Outages
from .publisher import Publisher, PublisherSettings
from .redis_client import connect
from .settings import WorkerSettings

_RETENTION_STREAMS = 4
"""RQ's records outlive the streams by this factor."""
_CLAIMS_PER_ROW = 3
"""Claimed jobs per row: those that run, and twice as many to choose from."""
_LONGEST_RUNNING_TTL_MS = 24 * 3600 * 1000


class Station:
    """Owns the threads that talk to Redis, each on a connection of its own."""

    def __init__(
        self,
        settings: WorkerSettings,
        worker_id: str,
        *,
        post: Callable[[Message], None],
        step_s: Callable[[], float],
        metrics: WorkerMetrics,
        on_death: Callable[[BaseException], None],
    ) -> None:
        """*step_s* tells how long the engine's last step took, for the pace of the intake."""
        self._metrics = metrics
        self._settings = settings
        self._worker_id = worker_id
        self._post = post
        self._step_s = step_s
        self._on_death = on_death
        self._outages = Outages(settings.connect_timeout_s)
        stream_ttl_ms = int(settings.stream_ttl_s * 1000)
        self._intake_settings = IntakeSettings(
            worker_id=worker_id,
            model=settings.alias,
            sampler_version=SAMPLER_VERSION,
            max_claims=_CLAIMS_PER_ROW * settings.max_batch,
            lease_s=settings.lease_s,
            max_wait_s=settings.max_wait_s,
            running_ttl_ms=max(stream_ttl_ms, _LONGEST_RUNNING_TTL_MS),
            stream_ttl_ms=stream_ttl_ms,
            retention_s=int(_RETENTION_STREAMS * settings.stream_ttl_s) + 1,
        )
        self.publisher = Publisher(
            connect(settings.redis),
            self._book(),
            PublisherSettings(
                worker_id=worker_id,
                sampler_version=SAMPLER_VERSION,
                running_ttl_ms=self._intake_settings.running_ttl_ms,
                stream_ttl_ms=stream_ttl_ms,
                max_pending_bytes=settings.publish_buffer_mb * 2**20,
            ),
            drop=post,
            on_death=on_death,
            on_written=metrics.publish_lag.observe,
            outages=self._outages,
        )

    def open(
        self, status: Callable[[], WorkerStatus], cache_report: Callable[[], CacheReport]
    ) -> None:
        """Register, take the lease, and begin to claim; every heartbeat tells both.

        Raises RedisError before anything has begun; it may be repeated then.
        """
        queue_names = [
            keys.queue_name(self._settings.alias, priority, "default") for priority in Priority
        ]
        self._registration = Registration(
            connect(self._settings.redis), self._worker_id, queue_names, self._settings.lease_s
        )
        self._registration.register()
        self._heartbeat = self._new_heartbeat(status, cache_report)
        self._intake = Intake(
            connect(self._settings.redis),
            self._book(),
            self.publisher,
            self._intake_settings,
            post=self._post,
            step_s=self._step_s,
            hears_bell=lambda: self._listener.is_subscribed.is_set(),
            on_death=self._on_death,
            on_end=self._metrics.ended,
            outages=self._outages,
        )
        self._maintenance = Maintenance(
            connect(self._settings.redis),
            self._book(),
            self._intake_settings,
            claims=self.publisher.claims,
            on_death=self._on_death,
            sweep=self._registration.sweep,
            outages=self._outages,
        )
        self._listener = self._new_listener()
        self._heartbeat.start()
        self.publisher.start()
        self._intake.start()
        self._maintenance.start()
        self._listener.start()

    @property
    def lease_age_s(self) -> float:
        """Seconds since Redis last confirmed the lease."""
        return time.monotonic() - self._heartbeat.last_beat_s

    def drain(self) -> None:
        """Claim nothing more."""
        self._intake.drain()

    def stop_intake(self) -> None:
        """Wait for a claim that is under way; after this no job comes in any more."""
        self._intake.stop()

    def close(self) -> None:
        """Leave: first what takes work, then what writes, the lease last.

        Raises RedisError where the server can't be told that we leave.
        """
        self._intake.stop()
        self._listener.stop()
        self._maintenance.stop()
        self.publisher.stop()
        self._maintenance.retire_queues()
        self._heartbeat.stop()
        self._registration.unregister()

    def _new_listener(self) -> Listener:
        return Listener(
            connect(self._settings.redis),
            self._worker_id,
            self._settings.alias,
            claims=self.publisher.open_claims,
            post=self._post,
            ring=self._intake.ring,
            hurry=self._heartbeat.hurry,
            on_death=self._on_death,
            outages=self._outages,
        )

    def _new_heartbeat(
        self, status: Callable[[], WorkerStatus], cache_report: Callable[[], CacheReport]
    ) -> Heartbeat:
        return Heartbeat(
            connect(self._settings.redis),
            self._book(),
            self._registration,
            self._intake_settings,
            claims=self.publisher.open_claims,
            status=status,
            caches=CacheWire(self._worker_id, report=cache_report, post=self._post),
            drop=self.publisher.abandon,
            on_death=self._on_death,
            outages=self._outages,
        )

    def _book(self) -> RQBook:
        return RQBook(
            connect(self._settings.redis),
            lease_s=self._settings.lease_s,
            retention_s=self._intake_settings.retention_s,
        )
