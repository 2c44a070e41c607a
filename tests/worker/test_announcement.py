"""What producers are told of a worker's model, and the list of all models."""

from headwater.producer.models import ModelDirectory
from headwater.schemas import ModelCard, TokenizerFiles, keys
from headwater.worker.announcement import Announcement
from redis import Redis

FILES = TokenizerFiles(tokenizer={"model": {}})


def announcement(redis: Redis, alias: str) -> Announcement:
    card = ModelCard(
        alias=alias,
        source="x",
        vocab_size=8,
        context_length=64,
        tokenizer_fingerprint=FILES.fingerprint,
    )
    return Announcement(redis, card, FILES)


def test_a_model_is_found_by_its_alias_and_in_the_list(redis: Redis) -> None:
    """Two models stand beside each other, however often they are announced."""
    for alias in ("b", "a", "b"):
        announcement(redis, alias).publish()

    models = ModelDirectory(redis)
    assert models.aliases() == ["a", "b"]
    assert models.card("b").alias == "b"


def test_nothing_of_an_announcement_lasts_for_ever(redis: Redis) -> None:
    """The list outlives no card, and forgets those whose cards are gone."""
    now_s, _ = redis.time()
    redis.zadd(keys.models_key(), {"gone": now_s - 1})
    announcement(redis, "a").publish()

    assert redis.zrange(keys.models_key(), 0, -1) == [b"a"]
    assert all(redis.ttl(key) > 0 for key in redis.scan_iter())
    expiry_s = redis.zscore(keys.models_key(), "a")
    assert isinstance(expiry_s, float)
    assert abs(now_s + redis.ttl(keys.model_card_key("a")) - expiry_s) <= 2
