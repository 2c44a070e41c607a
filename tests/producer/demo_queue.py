"""Jobs for one announced model, and what lies in its queue."""

from headwater.producer.client import new_job
from headwater.producer.client_queue import queue_keys
from headwater.schemas import GenerationJob, ModelCard, OrjsonSerializer
from redis import Redis
from rq.job import Job

CARD = ModelCard(
    alias="demo",
    source="/models/demo",
    vocab_size=100,
    context_length=64,
    tokenizer_fingerprint="sha256:demo",
)


QUEUE = "demo.normal.default"


def job(**fields: object) -> GenerationJob:
    return new_job("demo", [1, 2, 3], **{"max_tokens": 4, **fields})


def queued_ids(redis: Redis, name: str = QUEUE) -> list[str]:
    return [job_id.decode() for job_id in redis.lrange(queue_keys(name).waiting, 0, -1)]


def payload(redis: Redis, job_id: str) -> GenerationJob:
    (value,) = Job.fetch(job_id, connection=redis, serializer=OrjsonSerializer).args
    return GenerationJob.parse(value)
