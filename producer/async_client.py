"""AsyncProducer: the Producer for asyncio."""

import asyncio
from collections.abc import AsyncGenerator, Iterable
from typing import Self

from headwater.schemas import EntryId, GenerationJob, ModelCard
from redis import asyncio as aioredis

from .client import Producer, SubmitSettings
from .client_cancel import CancelOutcome
from .connection import resolve_url
from .result import GenerationResult, ResultCollector
from .tail import TailItem, atail


class AsyncProducer:
    """Does what a Producer does, without blocking the event loop.

    RQ speaks to the server synchronously, so submits and cancels run in threads; tails are
    asynchronous throughout, thousands of them need no thread.
    """

    def __init__(self, producer: Producer, redis: aioredis.Redis) -> None:
        """Use two clients of one server; `connect` makes both."""
        self._producer = producer
        self._redis = redis

    @classmethod
    async def connect(cls, url: str | None = None, settings: SubmitSettings | None = None) -> Self:
        """Connect to *url* or to this user's embedded server; raises ServerUnavailable."""
        resolved = await asyncio.to_thread(resolve_url, url)
        producer = await asyncio.to_thread(Producer, resolved, settings)
        return cls(producer, aioredis.Redis.from_url(resolved))

    async def close(self) -> None:
        """Close the connections."""
        await self._redis.aclose()
        await asyncio.to_thread(self._producer.close)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def submit(
        self,
        job: GenerationJob,
        *,
        idempotency_key: str | None = None,
        card: ModelCard | None = None,
    ) -> str:
        """See Producer.submit."""
        return await asyncio.to_thread(
            self._producer.submit, job, idempotency_key=idempotency_key, card=card
        )

    async def submit_many(
        self, jobs: Iterable[GenerationJob], *, card: ModelCard | None = None
    ) -> list[str]:
        """See Producer.submit_many; *jobs* is iterated in a thread."""
        return await asyncio.to_thread(self._producer.submit_many, jobs, card=card)

    async def cancel(self, job_id: str) -> CancelOutcome:
        """See Producer.cancel."""
        return await asyncio.to_thread(self._producer.cancel, job_id)

    def tail(self, job_id: str, after: EntryId | None = None) -> AsyncGenerator[TailItem, None]:
        """See tail.atail. Close it (aclose) where it is left before its end."""
        return atail(self._redis, job_id, after)

    async def result(self, job_id: str) -> GenerationResult:
        """Wait for the job's end and return its whole text."""
        collector = ResultCollector()
        async for item in self.tail(job_id):
            collector.feed(item)
        return collector.result()
