"""A worker without an engine: intake, publisher, heartbeat, on the real server."""

import queue
import threading
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest
from headwater.producer.client import Producer, SubmitSettings, new_job
from headwater.schemas import (
    CacheReport,
    ChoiceEnd,
    DeltaPart,
    End,
    Finished,
    FinishReason,
    GenerationJob,
    MemoryCache,
    TextSpan,
    Timings,
    Usage,
    WorkerStatus,
    keys,
)
from headwater.worker.booking.rq_jobs import RQBook
from headwater.worker.intake.cache_wire import CacheWire
from headwater.worker.intake.heartbeat import Heartbeat
from headwater.worker.intake.intake import Intake
from headwater.worker.intake.maintenance import Maintenance
from headwater.worker.intake.registration import Registration
from headwater.worker.intake.settings import IntakeSettings
from headwater.worker.messages import Admit, Claim, Message
from headwater.worker.publisher import Publisher, PublisherSettings
from headwater.worker.redis_client import connect
from headwater.worker.streams import JobStreams
from redis import Redis
from rq import Queue

LEASE_S = 1.0
FINISHED = Finished(
    choices=(ChoiceEnd(choice=0, finish_reason=FinishReason.STOP),),
    usage=Usage(prompt_tokens=1, completion_tokens=1),
    timings=Timings(total_ms=1.0),
)


def part(start: int, *token_ids: int) -> DeltaPart:
    """Return a part whose text is one letter a token."""
    text = "".join(chr(97 + token % 26) for token in token_ids)
    return DeltaPart(
        choice=0, start=start, token_ids=token_ids, text=(TextSpan(text_start=start, text=text),)
    )


@dataclass
class Station:
    """One worker's Redis side; the test is its engine."""

    url: str
    worker_id: str = field(default_factory=lambda: f"w{uuid.uuid4().hex[:8]}")
    max_claims: int = 8

    def __post_init__(self) -> None:
        self.inbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self.deaths: list[BaseException] = []
        self.ends: list[End] = []
        """Of jobs that ended at their claim."""
        self.ages: list[float] = []
        """Of the oldest token of each trip."""
        self.report = CacheReport(
            memory=MemoryCache(
                nbytes=0,
                pinned_nbytes=0,
                rows_nbytes=0,
                num_nodes=0,
                num_hits=0,
                num_evicted_nodes=0,
            )
        )
        self.redis = connect(self.url)
        self.settings = IntakeSettings(
            worker_id=self.worker_id,
            model="m",
            sampler_version=1,
            max_claims=self.max_claims,
            lease_s=LEASE_S,
        )
        self.book = RQBook(self.redis, lease_s=LEASE_S, retention_s=self.settings.retention_s)
        self.publisher = Publisher(
            connect(self.url),
            self.book,
            PublisherSettings(worker_id=self.worker_id, sampler_version=1),
            drop=self.inbox.put,
            on_death=self.deaths.append,
            on_written=self.ages.append,
        )
        self.intake = Intake(
            self.redis,
            self.book,
            self.publisher,
            self.settings,
            post=self.inbox.put,
            step_s=lambda: 0.0,
            hears_bell=lambda: False,
            on_death=self.deaths.append,
            on_end=self.ends.append,
        )
        self.maintenance = Maintenance(
            connect(self.url),
            self.book,
            self.settings,
            claims=self.publisher.claims,
            on_death=self.deaths.append,
        )
        registration = Registration(
            connect(self.url), self.worker_id, ["m.normal.default"], LEASE_S
        )
        registration.register()
        self.heartbeat = Heartbeat(
            connect(self.url),
            self.book,
            registration,
            self.settings,
            claims=self.publisher.open_claims,
            status=lambda: WorkerStatus(worker_id=self.worker_id, alias="m"),
            caches=CacheWire(self.worker_id, report=lambda: self.report, post=self.inbox.put),
            drop=self.publisher.abandon,
            on_death=self.deaths.append,
        )
        self.publisher.start()

    def claim_next(self) -> bool:
        """Look, and claim the next job on this thread; return whether there was one."""
        return self.intake._claim_next(self.intake._look())

    def claim(self) -> Claim:
        """Claim the next job on this thread and return its claim."""
        assert self.claim_next()
        message = self.inbox.get(timeout=10)
        assert isinstance(message, Admit)
        return message.claim

    def close(self) -> None:
        self.publisher.stop()
        assert self.deaths == []


@pytest.fixture
def station(redis_url: str) -> Iterator[Callable[..., Station]]:
    """Make stations that are closed when the test ends."""
    made: list[Station] = []

    def make(**options: int) -> Station:
        made.append(Station(redis_url, **options))
        made[-1].heartbeat.beat()
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.fixture
def submit(redis: Redis) -> Callable[..., str]:
    """Submit a job for model `m` and return its id."""
    producer = Producer(redis, SubmitSettings(check_model=False))

    def submit_one(**fields: object) -> str:
        values: dict[str, object] = {"max_tokens": 8} | fields
        job: GenerationJob = new_job("m", [1, 2, 3], **values)
        return producer.submit(job)

    return submit_one


QUEUE = "m.normal.default"
Stations = Callable[..., Station]
Submit = Callable[..., str]


def types_of(redis: Redis, job_id: str) -> list[str]:
    return [entry.event.type for entry in JobStreams(redis).read(job_id)]


def text_of(redis: Redis, job_id: str) -> str:
    reader = Producer(redis)
    spans = [span for item in reader.tail(job_id) for span in getattr(item, "text", ())]
    return "".join(span.text for span in spans)


def status_of(redis: Redis, job_id: str) -> str:
    return (redis.hget(f"rq:job:{job_id}", "status") or b"").decode()


def rq_counts(redis: Redis) -> dict[str, int]:
    """What `rq info` shows."""
    queue = Queue(QUEUE, connection=redis)
    return {
        "queued": queue.count,
        "started": queue.started_job_registry.count,
        "finished": queue.finished_job_registry.count,
        "failed": queue.failed_job_registry.count,
        "canceled": queue.canceled_job_registry.count,
    }


def wait_for_entries(redis: Redis, job_id: str, count: int) -> None:
    """Block until the stream holds so many entries."""
    last = "0-0"
    seen = 0
    while seen < count:
        reply = redis.xread({keys.stream_key(job_id): last}, block=5000)
        assert reply, f"only {seen} of {count} entries came"
        entries = reply[0][1]
        seen += len(entries)
        last = entries[-1][0]


def in_threads(*targets: Callable[[], object]) -> None:
    """Run all *targets* at once and wait for them."""
    threads = [threading.Thread(target=target) for target in targets]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
