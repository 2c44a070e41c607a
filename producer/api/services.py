"""Services: what the routes share, for as long as the server runs."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from typing import Any, TypeVar

import structlog
from headwater.schemas import GenerationJob
from redis import Redis
from redis import asyncio as aioredis
from redis.exceptions import RedisError

from ..async_client import AsyncProducer
from ..client import Producer, SubmitSettings
from ..connection import connect
from ..errors import ProducerError
from ..models import ModelDirectory
from ..openai_protocol.caller import Caller
from ..patience import insist
from .api_keys import KeyFile
from .feed import Feed
from .metrics import ApiMetrics
from .rate_limit import RateLimit
from .settings import ApiSettings

T = TypeVar("T")

log = structlog.get_logger()

_OUTAGE_S = 1.0
"""How long a request waits for Redis: HTTP's clients try again by themselves."""


class Services:
    """Connections, limits and figures of one server, and the tasks that outlive a request."""

    def __init__(self, url: str, settings: ApiSettings) -> None:
        """Connect to the Redis at *url* and read the key file; raises ProducerError's kinds."""
        self.settings = settings
        self.key_file = KeyFile(settings.keys_file) if settings.keys_file else None
        self.rate_limit = RateLimit()
        self.metrics = ApiMetrics()
        self.redis: Redis = connect(url)
        self.models = ModelDirectory(self.redis, _OUTAGE_S)
        self.is_stopping = False
        self._async_redis = aioredis.Redis.from_url(url)
        self._producers: dict[int | None, AsyncProducer] = {}
        self._feeds: set[Feed] = set()
        self._tasks: set[asyncio.Task[Any]] = set()

    def look(self, read: Callable[[Redis], T]) -> T:
        """Return what *read*, which may be repeated, makes of Redis; not on the event loop."""
        return insist(lambda: read(self.redis), _OUTAGE_S)

    @property
    def producer(self) -> AsyncProducer:
        """The producer without a limit of its own: for reading and cancelling."""
        return self._producer(None)

    async def submit(self, caller: Caller, jobs: Sequence[GenerationJob]) -> list[str]:
        """Enqueue *jobs* within the caller's limits and return their ids.

        Raises QueueFull and InvalidRequest's kinds; then none of at most 256 jobs is enqueued.
        """
        ids = await self._producer(self._limit(caller)).submit_many(jobs)
        for job in jobs:
            self.metrics.jobs.labels(job.model).inc()
        return ids

    async def submit_once(
        self, caller: Caller, job: GenerationJob, idempotency_key: str | None
    ) -> str:
        """Enqueue one job; see Producer.submit for the key."""
        job_id = await self._producer(self._limit(caller)).submit(
            job, idempotency_key=idempotency_key
        )
        self.metrics.jobs.labels(job.model).inc()
        return job_id

    def open_feed(self, job_ids: Sequence[str], after: Any = None) -> Feed:
        """Return a feed of the jobs' items; give it back with close_feed."""
        feed = Feed([self.producer.tail(job_id, after) for job_id in job_ids])
        self._feeds.add(feed)
        self.metrics.streams.inc()
        return feed

    def close_feed(self, feed: Feed) -> None:
        """Let go of a feed; never waits."""
        feed.close()
        self._feeds.discard(feed)
        self.metrics.streams.dec()
        self.spawn(feed.closed())

    def cancel_later(self, job_ids: Sequence[str]) -> None:
        """Cancel the jobs of a client that went away."""
        for job_id in job_ids:
            self.metrics.cancelled.inc()
            self.spawn(self._cancel(job_id))

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run *work* on a task of its own, which the end waits for."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def stop_streams(self) -> None:
        """End all streams: their clients read on elsewhere, and no job is cancelled for it."""
        self.is_stopping = True
        for feed in self._feeds:
            feed.stop()

    async def close(self) -> None:
        """Finish what runs and close the connections."""
        while self._tasks:
            await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._async_redis.aclose()
        self.redis.close()

    def _limit(self, caller: Caller) -> int | None:
        given = (caller.max_queued, self.settings.max_queue_depth)
        return min((limit for limit in given if limit is not None), default=None)

    def _producer(self, max_queue_depth: int | None) -> AsyncProducer:
        producer = self._producers.get(max_queue_depth)
        if producer is None:
            settings = SubmitSettings(max_queue_depth=max_queue_depth, outage_s=_OUTAGE_S)
            producer = AsyncProducer(Producer(self.redis, settings), self._async_redis)
            self._producers[max_queue_depth] = producer
        return producer

    async def _cancel(self, job_id: str) -> None:
        with suppress(ProducerError, RedisError):  # the job then runs to its end: no harm
            outcome = await self.producer.cancel(job_id)
            log.info("cancelled_for_its_client", job_id=job_id, outcome=outcome.value)
