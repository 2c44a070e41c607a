"""ActiveQueues: the names of a model's queues with work, and what becomes of those without."""

from typing import Any

from headwater.schemas import keys
from redis import Redis
from redis.exceptions import WatchError

from ..booking.rq_jobs import QUEUES_KEY, job_keys


class ActiveQueues:
    """The queues of one model. Any of its workers may take a name away, and all may try."""

    def __init__(self, redis: Redis, model: str, retention_s: int) -> None:
        """*retention_s*: how long RQ's records of ended jobs are kept."""
        self._redis = redis
        self._model = model
        self._retention_s = retention_s

    def names(self) -> list[str]:
        """Return the queues that hold or held jobs; raises RedisError."""
        members: Any = self._redis.smembers(keys.active_queues_key(self._model))
        return sorted(member.decode("utf-8", "replace") for member in members)

    def retire(self, queue_name: str) -> None:
        """Take a queue's name out of our set and RQ's if nothing waits or runs there.

        Raises RedisError.
        """
        names = job_keys("", queue_name)
        used = (names.queue, names.intermediate, names.started)
        pipeline: Any  # redis-py leaves half of it untyped
        with self._redis.pipeline() as pipeline:
            # Whoever puts a job there adds the name in the same transaction: it can't be lost.
            pipeline.watch(*used)
            if pipeline.exists(*used):
                return
            now_s, _ = pipeline.time()
            pipeline.multi()
            pipeline.srem(keys.active_queues_key(self._model), queue_name)
            pipeline.srem(QUEUES_KEY, names.queue)
            self._remember(pipeline, queue_name, now_s)
            try:
                pipeline.execute()
            except WatchError:
                return  # it has work again

    def _remember(self, pipeline: Any, queue_name: str, now_s: int) -> None:
        """Let onlookers find what has ended there, as long as RQ has it."""
        idle = keys.idle_queues_key()
        pipeline.zadd(idle, {queue_name: now_s + self._retention_s})
        pipeline.zremrangebyscore(idle, "-inf", now_s)
        # Another worker may keep its records longer than we do.
        pipeline.expire(idle, self._retention_s, nx=True)
        pipeline.expire(idle, self._retention_s, gt=True)
