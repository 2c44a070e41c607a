"""Thousands of jobs that can't be run between good ones, in one real worker."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest
from headwater.producer.client import Producer
from headwater.producer.embedded import EmbeddedServer
from headwater.producer.errors import UnknownJob
from headwater.producer.result import ChoiceResult, collect
from headwater.schemas import END_TYPES, Failed, Finished, decode_entry, keys

from tests.faults.conftest import (
    QUEUE,
    FaultyWorker,
    check_no_lasting_key,
    job,
    result_of,
    worker_starter,
)
from tests.faults.malformed import BROKEN, KINDS, UNKNOWN, Kind, submit_wrong

ROUND = 100
"""Wrong jobs between two looks at the worker."""
GOOD_EVERY = 10
LARGE_EVERY = 3
"""Of the rounds through all kinds, those with the large ones; the first among them: memory that
they leave fragmented has to be there before the first look at it."""
MAX_MESSAGE_CHARS = 1000


@dataclass
class Field:
    """Wrong jobs with good ones between them, and what they came to."""

    producer: Producer
    undisturbed: ChoiceResult
    _kinds: Iterator[tuple[str, Kind]] = field(init=False)
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    def __post_init__(self) -> None:
        self._kinds = self._endless_kinds()

    def sow(self, count: int) -> None:
        """Submit wrong jobs with good ones between them, and check how each ends."""
        wrong: dict[str, str] = {}
        good: list[str] = []
        for _ in range(count):
            name, kind = next(self._kinds)
            number = next(self._numbers)
            job_id = f"wrong-{number}"
            submit_wrong(self.producer, kind, job_id=job_id)
            wrong[job_id] = name
            if number % GOOD_EVERY == 0:
                good.append(self.producer.submit(job()))
        # They are claimed in their order: when this one runs, all others have been.
        good.append(self.producer.submit(job()))
        for job_id in good:
            result = result_of(self.producer, job_id)
            assert isinstance(result.end, Finished)
            assert result.choices[0] == self.undisturbed
        for job_id, name in wrong.items():
            self._check(job_id, name)

    def _endless_kinds(self) -> Iterator[tuple[str, Kind]]:
        for cycle in itertools.count():
            takes_large = cycle % LARGE_EVERY == 0
            yield from (each for each in KINDS.items() if takes_large or not each[1].is_large)

    def _check(self, job_id: str, name: str) -> None:
        ends_as = KINDS[name].ends_as
        if ends_as == UNKNOWN:
            with pytest.raises(UnknownJob):
                result_of(self.producer, job_id)
        elif ends_as == BROKEN:
            assert self._status(job_id) == "failed", name
        else:
            end = collect(self.producer.tail(job_id)).end
            assert isinstance(end, END_TYPES)
            told = end.code if isinstance(end, Failed) else end.type
            assert told == ends_as, name
            if isinstance(end, Failed):
                assert 0 < len(end.message) < MAX_MESSAGE_CHARS, name
            self._check_one_end(job_id, name)

    def _check_one_end(self, job_id: str, name: str) -> None:
        found: Any = self.producer.redis.xrange(keys.stream_key(job_id))
        events = [decode_entry(*entry).event for entry in found]
        assert sum(isinstance(event, END_TYPES) for event in events) == 1, name

    def _status(self, job_id: str) -> str | None:
        """Wait until RQ says that a job has ended, and return its word for it."""
        while True:
            status = self.producer.redis.hget(f"rq:job:{job_id}", "status")
            if status not in (b"queued", b"started"):
                return status and status.decode()


@pytest.fixture
def worker(server: EmbeddedServer, format_model: Path) -> Iterator[FaultyWorker]:
    with worker_starter(server.url, format_model) as start:
        yield start("--max-batch", "8", "--kv-budget-mb", "64")


@pytest.fixture
def sowing(producer: Producer, worker: FaultyWorker) -> Field:
    return Field(producer, result_of(producer, producer.submit(job())).choices[0])


def check_nothing_is_left(producer: Producer) -> None:
    """Nothing waits, runs, or lies where no worker looks."""
    redis = producer.redis
    assert redis.llen(f"rq:queue:{QUEUE}") == 0
    assert redis.llen(f"rq:queue:{QUEUE}:intermediate") == 0
    assert redis.zcard(f"rq:wip:{QUEUE}") == 0
    check_no_lasting_key(producer)


def test_every_kind_of_wrong_job_gets_its_end_and_the_good_ones_run(
    producer: Producer, sowing: Field, worker: FaultyWorker
) -> None:
    """One of each kind, with good jobs between them that come out as undisturbed."""
    assert len(KINDS) > 20

    sowing.sow(len(KINDS))

    check_nothing_is_left(producer)
    assert worker.stop() == 0


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_ten_thousand_wrong_jobs_cost_no_memory(
    producer: Producer, sowing: Field, worker: FaultyWorker
) -> None:
    """After the first thousand, ten times as many leave the worker's memory as it is."""
    process = psutil.Process(worker.process.pid)
    for _ in range(1000 // ROUND):
        sowing.sow(ROUND)
    base = process.memory_info().rss

    sizes = []
    for _ in range(9000 // ROUND):
        sowing.sow(ROUND)
        sizes.append(process.memory_info().rss)

    print(f"RSS in MiB after 1,000: {base / 2**20:.1f}; then, round by round:")
    print(*(f"{size / 2**20:.1f}" for size in sizes))
    assert sizes[-1] <= 1.05 * base
    check_nothing_is_left(producer)
    assert worker.stop() == 0
