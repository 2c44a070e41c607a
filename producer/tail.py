"""tail and atail: a job's stream as it grows, every character exactly once."""

import asyncio
import time
from collections.abc import AsyncGenerator, Iterator, Mapping
from typing import Any

from headwater.schemas import EntryId, StreamEntry
from redis import ConnectionPool, Redis
from redis import asyncio as aioredis
from redis.asyncio.retry import Retry as AsyncRetry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError
from redis.retry import Retry

from .stream_reader import AttemptOpened, Ended, Output, Restart, TailItem
from .tail_steps import Command, Pause, TailSettings, parse_xread, tail_steps

__all__ = [
    "AttemptOpened",
    "Ended",
    "Output",
    "Restart",
    "TailItem",
    "TailSettings",
    "atail",
    "read_many",
    "reading_client",
    "tail",
]

_RUNTIME_OPTIONS = ("himport_", "maint_", "orig_")
"""Options that a redis-py pool adds for itself and that belong to that one pool."""


def tail(
    redis: Redis, job_id: str, after: EntryId | None = None, settings: TailSettings | None = None
) -> Iterator[TailItem]:
    """Yield the job's items from its start, or after entry *after*, up to its end.

    Reads on a connection of its own to the server that *redis* talks to. Raises UnknownJob,
    StreamExpired, JobLost, StreamGap, StreamDiverged, ServerUnavailable.
    """
    settings = settings or TailSettings()
    steps = tail_steps(job_id, after, settings)
    with reading_client(redis, settings) as client:
        try:
            step = next(steps)
            while True:
                if isinstance(step, Command):
                    try:
                        reply = client.execute_command(*step.args)
                    except RedisError as error:
                        step = steps.throw(error)
                    else:
                        step = steps.send(reply)
                elif isinstance(step, Pause):
                    time.sleep(step.seconds)
                    step = next(steps)
                else:
                    yield step
                    step = next(steps)
        except StopIteration:
            return


async def atail(
    redis: aioredis.Redis,
    job_id: str,
    after: EntryId | None = None,
    settings: TailSettings | None = None,
) -> AsyncGenerator[TailItem, None]:
    """Do what tail does, for asyncio."""
    settings = settings or TailSettings()
    steps = tail_steps(job_id, after, settings)
    async with _async_reading_client(redis, settings) as client:
        try:
            step = next(steps)
            while True:
                if isinstance(step, Command):
                    try:
                        reply = await client.execute_command(*step.args)
                    except RedisError as error:
                        step = steps.throw(error)
                    else:
                        step = steps.send(reply)
                elif isinstance(step, Pause):
                    await asyncio.sleep(step.seconds)
                    step = next(steps)
                else:
                    yield step
                    step = next(steps)
        except StopIteration:
            return


def read_many(
    client: Any, positions: Mapping[str, EntryId], settings: TailSettings
) -> dict[str, list[StreamEntry]]:
    """Return what stands in each stream after its position, by the streams' keys.

    One read for all, with a client of reading_client's; waits for a moment where there is
    nothing new. Raises RedisError, and SchemaError for entries that are none.
    """
    after = map(str, positions.values())
    limits = ("COUNT", settings.batch, "BLOCK", settings.block_ms)
    reply = client.execute_command("XREAD", *limits, "STREAMS", *positions, *after)
    return parse_xread(reply)


def reading_client(redis: Redis, settings: TailSettings) -> Any:
    """Return a client of the same server for blocking reads, which retries nothing itself."""
    pool = redis.connection_pool
    options = _options(pool.connection_kwargs, settings) | {"retry": Retry(NoBackoff(), 0)}
    own = ConnectionPool(connection_class=pool.connection_class, max_connections=1, **options)
    return Redis.from_pool(own)


def _async_reading_client(redis: aioredis.Redis, settings: TailSettings) -> Any:
    pool = redis.connection_pool
    options = _options(pool.connection_kwargs, settings) | {"retry": AsyncRetry(NoBackoff(), 0)}
    own: Any = aioredis.ConnectionPool(
        connection_class=pool.connection_class, max_connections=1, **options
    )
    return aioredis.Redis.from_pool(own)


def _options(of_pool: dict[str, Any], settings: TailSettings) -> dict[str, Any]:
    options = {k: v for k, v in of_pool.items() if not k.startswith(_RUNTIME_OPTIONS)}
    # A blocking read must end before its socket gives up; the steps retry, not the client.
    options["socket_timeout"] = settings.block_ms / 1000 + settings.reply_margin_s
    options["decode_responses"] = False
    options.pop("retry_on_error", None)
    options.pop("retry_on_timeout", None)
    return options
