"""What an onlooker reads of queues, workers and models, and what it costs the server."""

from collections import Counter
from collections.abc import Callable

import pytest
from headwater.producer.api.gauges import read_gauges
from headwater.producer.api.metrics import ApiMetrics
from headwater.producer.caches import read_caches
from headwater.producer.client import Producer, SubmitSettings, new_job
from headwater.producer.client_queue import job_key, queue_keys
from headwater.producer.models import ModelDirectory
from headwater.producer.overview import read_overview
from headwater.producer.status import read_status, read_workers
from headwater.schemas import ModelCard, WorkerStatus, keys
from redis import Redis

from tests.announced import announce_model, announce_worker

NUM_FOREIGN = 20_000
QUEUE = "demo.normal.default"
CARD = ModelCard(
    alias="demo", source="x", vocab_size=8, context_length=64, tokenizer_fingerprint="f"
)
LOOKS: dict[str, Callable[[Redis], object]] = {
    "overview": read_overview,
    "workers": read_workers,
    "caches": read_caches,
    "metrics": lambda redis: read_gauges(redis, ApiMetrics()),
    "models": lambda redis: ModelDirectory(redis).aliases(),
}


@pytest.fixture
def lively(redis: Redis) -> Redis:
    """A server with a worker, its model, and a job that waits."""
    announce_worker(redis, WorkerStatus(worker_id="w", alias="demo"))
    announce_model(redis, CARD)
    Producer(redis).submit(new_job("demo", [1], max_tokens=1))
    return redis


def commands_of(redis: Redis, look: Callable[[Redis], object]) -> Counter[str]:
    """Return how often the server ran each command for a look."""
    redis.config_resetstat()
    look(redis)
    found = redis.info("commandstats")
    return Counter({name: int(value["calls"]) for name, value in found.items()})


def add_foreign_keys(redis: Redis) -> None:
    """Fill the server with what others, and our own jobs, leave there."""
    with redis.pipeline(transaction=False) as pipeline:
        for number in range(NUM_FOREIGN // 4):
            for name in ("other:%d", "rq:job:%d", "headwater:events:%d", "headwater:attempt:%d"):
                pipeline.set(name % number, 1)
        pipeline.sadd("rq:queues", *(f"rq:queue:other-{number}" for number in range(50)))
        pipeline.sadd("rq:workers", *(f"rq:worker:other-{number}" for number in range(50)))
        pipeline.execute()


def test_a_look_costs_the_same_however_many_keys_the_server_holds(lively: Redis) -> None:
    """Nobody walks the whole keyspace."""
    before = {name: commands_of(lively, look) for name, look in LOOKS.items()}
    add_foreign_keys(lively)

    for name, look in LOOKS.items():
        commands = commands_of(lively, look)
        assert commands == before[name], name
        assert "cmdstat_scan" not in commands
        assert "cmdstat_keys" not in commands


def test_a_worker_whose_lease_has_lapsed_is_not_alive(lively: Redis) -> None:
    """Its name may stay listed for a while."""
    announce_worker(lively, WorkerStatus(worker_id="dead", alias="demo"))
    lively.delete(keys.worker_key("dead"))

    assert [worker.status.worker_id for worker in read_workers(lively)] == ["w"]


def test_a_queue_of_others_is_not_shown(lively: Redis) -> None:
    """Not even one whose name could be ours."""
    names = ("default", "demo.other", "demo.normal.theirs", "x.high.y")
    lively.sadd("rq:queues", *(f"rq:queue:{name}" for name in names))

    assert [queue.name for queue in read_status(lively).queues] == [QUEUE]


def test_a_queue_that_rqs_tools_forgot_is_shown_where_a_worker_serves_it(lively: Redis) -> None:
    """Its jobs run all the same."""
    lively.delete("rq:queues")

    assert [queue.name for queue in read_status(lively).queues] == [QUEUE]


def test_an_idle_queue_is_shown_as_long_as_what_ended_there(lively: Redis) -> None:
    """Its name has left the sets of those with work."""
    now_s, _ = lively.time()
    lively.zadd(keys.idle_queues_key(), {"demo.high.a": now_s + 60, "demo.high.b": now_s - 60})
    lively.zadd(queue_keys("demo.high.a").finished, {"job": now_s + 60})

    shown = {queue.name: queue.finished for queue in read_status(lively).queues}

    assert shown == {"demo.high.a": 1, QUEUE: 0}


def test_a_damaged_job_at_the_front_hides_nothing(redis: Redis) -> None:
    """It has no age; all else is told."""
    producer = Producer(redis, SubmitSettings(check_model=False))
    job_id = producer.submit(new_job("demo", [1], max_tokens=1))
    redis.delete(job_key(job_id))
    redis.set(job_key(job_id), "no hash")

    (queue,) = read_status(redis).queues

    assert (queue.depth, queue.oldest_age_s) == (1, None)


def test_an_alias_is_listed_until_its_card_expires(lively: Redis) -> None:
    """By the server's clock."""
    now_s, _ = lively.time()
    lively.zadd(keys.models_key(), {"old": now_s - 1})

    assert ModelDirectory(lively).aliases() == ["demo"]
