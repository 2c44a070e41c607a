"""Heartbeat: the worker's lease, and those of its jobs, from a thread that only does this."""

import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

import structlog
from headwater.schemas import WorkerStatus, keys
from redis import Redis
from redis.exceptions import RedisError

from ..booking.rq_jobs import RQBook, RunningJob
from ..messages import Claim
from ..outages import Outages
from ..watched_thread import WatchedThread
from .cache_wire import CacheWire
from .registration import Registration
from .settings import IntakeSettings

log = structlog.get_logger()

_LIST_TTL_S = 24 * 3600
"""Of the list of workers: any lease is renewed sooner."""


class Heartbeat:
    """Keeps the lease key alive: Redis' clock decides when it has lapsed, not ours.

    Never waits for the device. Jobs whose execution is gone, and all jobs once the lease has
    lapsed unrenewed, are not ours any more: *drop* is told of each.
    """

    def __init__(
        self,
        redis: Redis,
        book: RQBook,
        registration: Registration,
        settings: IntakeSettings,
        *,
        claims: Callable[[], Iterable[Claim]],
        status: Callable[[], WorkerStatus],
        caches: CacheWire,
        drop: Callable[[str], None],
        on_death: Callable[[BaseException], None],
        outages: Outages | None = None,
    ) -> None:
        self._redis = redis
        self._book = book
        self._registration = registration
        self._settings = settings
        self._claims = claims
        self._status = status
        self._caches = caches
        self._drop = drop
        self._wake = threading.Event()
        self._outages = outages or Outages()
        self._thread = WatchedThread("heartbeat", self._run, on_death)
        self.last_beat_s = time.monotonic()
        """When Redis last confirmed the lease."""

    def start(self) -> None:
        """Take the lease, then keep it from a thread; raises RedisError where that fails."""
        self.beat()
        self._thread.start()

    def hurry(self) -> None:
        """Beat soon: somebody wants something of the caches."""
        self._wake.set()

    def stop(self) -> None:
        """End the thread and give the lease back; raises RedisError."""
        self._thread.stopping.set()
        self._wake.set()
        self._thread.stop()
        worker_id = self._settings.worker_id
        with self._redis.pipeline() as pipeline:
            pipeline.zrem(keys.workers_key(), worker_id)
            pipeline.delete(keys.worker_key(worker_id), *self._caches.names)
            pipeline.execute()

    def beat(self) -> None:
        """Renew the lease and what hangs on it; raises RedisError."""
        seconds, microseconds = self._redis.time()
        at_ms = seconds * 1000 + microseconds // 1000
        claims = list(self._claims())
        sent_s = time.monotonic()
        # The expiry of RQ's records is far off, so their clock may be ours, roughly.
        now_s = time.time()
        status = self._status().model_copy(update={"at_ms": at_ms}).encode()
        with self._redis.pipeline(transaction=False) as pipeline:
            key = keys.worker_key(self._settings.worker_id)
            lease_ms = int(self._settings.lease_s * 1000)
            pipeline.set(key, status, px=lease_ms)
            self._registration.touch(pipeline, is_busy=bool(claims))
            self._list(pipeline, at_ms, lease_ms)
            self._caches.speak(pipeline, lease_ms)
            offset = len(pipeline)
            for claim in claims:
                self._touch(pipeline, claim, now_s)
            replies: list[Any] = pipeline.execute()
        self.last_beat_s = sent_s
        self._registration.restore(replies[1])
        self._caches.hear(replies[offset - 1])
        # A job may have ended on the way; its execution is gone rightly then.
        still_open = {claim.job_id for claim in self._claims()} if claims else set()
        per_claim = (len(replies) - offset) // len(claims) if claims else 0
        for index, claim in enumerate(claims):
            is_gone = not replies[offset + index * per_claim]
            if is_gone and claim.job_id in still_open:
                log.warning("execution_lost", job_id=claim.job_id)
                self._drop(claim.job_id)

    def _list(self, pipeline: Any, at_ms: int, lease_ms: int) -> None:
        """Keep our id where onlookers find it, and take out those of workers that died."""
        listed = keys.workers_key()
        # Later than the lease's end: no name may leave while its worker is alive.
        pipeline.zadd(listed, {self._settings.worker_id: at_ms + 2 * lease_ms})
        pipeline.zremrangebyscore(listed, "-inf", at_ms)
        pipeline.expire(listed, _LIST_TTL_S)

    def _touch(self, pipeline: Any, claim: Claim, now_s: float) -> None:
        worker_id = self._settings.worker_id
        running = RunningJob(claim.job_id, claim.queue_name, claim.execution_id, worker_id)
        self._book.touch_execution(pipeline, running, now_s)
        ttl_ms = self._settings.running_ttl_ms
        pipeline.pexpire(keys.stream_key(claim.job_id), ttl_ms, gt=True)
        pipeline.pexpire(keys.attempt_key(claim.job_id), 2 * ttl_ms, gt=True)

    def _run(self) -> None:
        while not self._thread.stopping.is_set():
            self._wake.wait(self._caches.next_beat_s(self._settings.heartbeat_s))
            self._wake.clear()
            if not self._thread.stopping.is_set():
                self._beat_or_lose()

    def _beat_or_lose(self) -> None:
        try:
            if time.monotonic() - self.last_beat_s > self._settings.lease_s:
                self._lose_all()
            self.beat()
        except RedisError as error:
            self._outages.note("heartbeat_failed", error)

    def _lose_all(self) -> None:
        """Nobody may think that we are alive: others are free to take our jobs."""
        for claim in self._claims():
            log.warning("lease_lost", job_id=claim.job_id)
            self._drop(claim.job_id)
