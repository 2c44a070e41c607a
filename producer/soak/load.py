"""The soak's jobs: a few requests, again and again, so that every output has a twin."""

import random
import uuid
from contextlib import suppress
from dataclasses import dataclass, field

from headwater.schemas import GenerationJob, keys
from redis.exceptions import RedisError

from ..client import Producer, new_job
from ..errors import DuplicateJob, ProducerError
from .fleet import ALIAS

_NUM_REQUESTS = 24
_NUM_BYTE_TOKENS = 256
_NUM_OUTSTANDING = 64
_ROUND = 16


@dataclass
class Load:
    """Keeps a number of jobs outstanding and notes which of them have ended."""

    producer: Producer
    seed: int
    requests: list[GenerationJob] = field(init=False)
    submitted: dict[str, int] = field(default_factory=dict)
    """The request of each job that was submitted."""
    open_jobs: set[str] = field(default_factory=set)
    _unsure: list[GenerationJob] = field(default_factory=list)
    """Not known to be in their queue: the server went away meanwhile."""

    def __post_init__(self) -> None:
        dice = random.Random(self.seed)  # noqa: S311 - no secret
        shared = [dice.randrange(_NUM_BYTE_TOKENS) for _ in range(48)]
        self.requests = [_request(dice, shared, index) for index in range(_NUM_REQUESTS)]
        self._dice = dice

    @property
    def num_ended(self) -> int:
        """Jobs that have ended."""
        return len(self.submitted) - len(self.open_jobs)

    def fill(self) -> None:
        """Submit jobs until enough are outstanding; an outage leaves the rest for later."""
        try:
            while len(self.open_jobs) < _NUM_OUTSTANDING:
                self._submit_round()
        except (RedisError, ProducerError):
            return

    def look(self) -> None:
        """Find out which jobs have ended; an outage is no news."""
        jobs = list(self.open_jobs)
        try:
            with self.producer.redis.pipeline(transaction=False) as pipeline:
                for job_id in jobs:
                    pipeline.xrevrange(keys.stream_key(job_id), count=1)
                tips = pipeline.execute()
        except RedisError:
            return
        for job_id, tip in zip(jobs, tips, strict=True):
            if tip and b"end" in tip[0][1]:
                self.open_jobs.discard(job_id)

    def _submit_round(self) -> None:
        if not self._unsure:
            for _ in range(_ROUND):
                index = self._dice.randrange(len(self.requests))
                job = self.requests[index].model_copy(update={"job_id": uuid.uuid4().hex})
                self._unsure.append(job)
                self.submitted[job.job_id] = index
                self.open_jobs.add(job.job_id)
        while self._unsure:
            # A duplicate was sent before, and only the reply was lost.
            with suppress(DuplicateJob):
                self.producer.submit(self._unsure[-1])
            self._unsure.pop()


def _request(dice: random.Random, shared: list[int], index: int) -> GenerationJob:
    own = [dice.randrange(_NUM_BYTE_TOKENS) for _ in range(dice.randint(1, 40))]
    sampling = {"temperature": 0.8, "seed": index} if index % 4 == 0 else {"temperature": 0.0}
    return new_job(
        ALIAS,
        [*shared, *own] if index % 2 else own,
        max_tokens=dice.randint(16, 200),
        ignore_eos=True,
        sampling=sampling,
        stream="final" if index % 8 == 1 else "deltas",
    )
