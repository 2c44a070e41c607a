"""Announcement: the model's card and tokenizer in Redis, for producers."""

from headwater.schemas import ModelCard, TokenizerFiles, keys
from redis import Redis

_TTL_S = 7 * 24 * 3600
"""Producers may prepare work while no worker runs, for so long."""


class Announcement:
    """What a worker says of its model; repeated now and then, it never lapses while one runs."""

    def __init__(self, redis: Redis, card: ModelCard, files: TokenizerFiles) -> None:
        self._redis = redis
        self._card = card
        self._tokenizer = files.compress()

    def publish(self) -> None:
        """Write both, and the alias among the others, with an expiry; raises RedisError."""
        fingerprint = self._card.tokenizer_fingerprint
        alias, listed = self._card.alias, keys.models_key()
        # By the server's clock, which also decides when a card is gone.
        now_s, _ = self._redis.time()
        with self._redis.pipeline() as pipeline:
            pipeline.set(keys.tokenizer_key(fingerprint), self._tokenizer, ex=_TTL_S)
            pipeline.set(keys.model_card_key(alias), self._card.encode(), ex=_TTL_S)
            pipeline.zadd(listed, {alias: now_s + _TTL_S})
            pipeline.zremrangebyscore(listed, "-inf", now_s)
            pipeline.expire(listed, _TTL_S)
            pipeline.execute()
