"""What a worker says of itself and its model, written by hand where none runs."""

from headwater.schemas import ModelCard, WorkerStatus, keys
from redis import Redis

TTL_S = 60


def announce_worker(redis: Redis, status: WorkerStatus, value: bytes | None = None) -> None:
    """Let a worker be alive for a minute; *value* stands where its status would."""
    now_s, _ = redis.time()
    redis.set(keys.worker_key(status.worker_id), value or status.encode(), ex=TTL_S)
    redis.zadd(keys.workers_key(), {status.worker_id: (now_s + TTL_S) * 1000})


def announce_model(redis: Redis, card: ModelCard) -> None:
    """Let a model be known for a minute."""
    now_s, _ = redis.time()
    redis.set(keys.model_card_key(card.alias), card.encode(), ex=TTL_S)
    redis.zadd(keys.models_key(), {card.alias: now_s + TTL_S})
