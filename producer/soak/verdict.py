"""The verdict: every stream of a soak read again, character for character."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from headwater.schemas import END_TYPES, Finished, Resumed, StreamEntry, decode_entry, keys
from redis import Redis

from ..client import Producer
from ..client_queue import RQ_FIELDS, job_key, parse_rq_job
from ..errors import ProducerError
from ..result import collect
from .load import Load


class Verdict(NamedTuple):
    """What a soak came to. The first eight are the command's contract."""

    jobs: int
    lost: int
    """Ended otherwise than finished, or with tokens missing."""
    duplicated: int
    """More than one end, something after it, or more tokens than asked for."""
    stuck: int
    keys_without_expiry: int
    kills: int
    redis_restarts: int
    resumed_attempts: int
    different: int
    """Whole, but not the text of the same request without faults."""
    open_in_rq: int
    """Ended in the stream and not in RQ."""
    pauses: int
    unexpected_exits: int
    lease_s: float
    undisturbed_jobs_per_s: float
    jobs_per_s: float
    complaints: tuple[str, ...]
    """One line for each job that is not as it should be, each lasting key, each early exit."""

    @property
    def is_good(self) -> bool:
        """Whether nothing was lost, doubled, stuck or left behind."""
        return not (
            self.lost
            or self.duplicated
            or self.stuck
            or self.keys_without_expiry
            or self.different
            or self.open_in_rq
        )


@dataclass
class Inspection:
    """Reads the streams of a load's jobs and counts what is wrong with them."""

    producer: Producer
    load: Load
    counts: Counter[str] = field(default_factory=Counter)
    complaints: list[str] = field(default_factory=list)
    _outputs: dict[int, tuple[tuple[int, ...], str]] = field(default_factory=dict)
    """Of each request, from its first job: that one ran before the faults began."""

    def run(self) -> None:
        """Look at every job, in the order of their submission, and at every key."""
        for job_id, index in self.load.submitted.items():
            fault = "stuck" if job_id in self.load.open_jobs else self._fault(job_id, index)
            if fault is not None:
                kind, _, detail = fault.partition(": ")
                self.counts[kind] += 1
                self.complaints.append(f"{job_id} {kind} {detail}")
        lasting = lasting_keys(self.producer.redis)
        self.counts["lasting"] = len(lasting)
        self.complaints += [f"{key} has no expiry" for key in lasting]

    def _fault(self, job_id: str, index: int) -> str | None:
        found: Any = self.producer.redis.xrange(keys.stream_key(job_id))
        entries = [decode_entry(entry_id, fields) for entry_id, fields in found]
        self.counts["resumed"] += sum(isinstance(entry.event, Resumed) for entry in entries)
        self._check_rq(job_id)
        return _fault_of_end(entries) or self._fault_of_output(job_id, index)

    def _fault_of_output(self, job_id: str, index: int) -> str | None:
        try:
            result = collect(self.producer.tail(job_id))
        except ProducerError as error:
            return f"lost: {type(error).__name__}: {error}"
        output = result.choices[0].token_ids, result.choices[0].text
        surplus = len(output[0]) - self.load.requests[index].max_tokens
        if surplus:
            return f"{'duplicated' if surplus > 0 else 'lost'}: {surplus:+} tokens"
        if self._outputs.setdefault(index, output) != output:
            return f"different: not the text of request {index} without faults"
        return None

    def _check_rq(self, job_id: str) -> None:
        record = parse_rq_job(self.producer.redis.hmget(job_key(job_id), RQ_FIELDS))
        if record is None or record.status != "finished":
            self.counts["open_in_rq"] += 1
            self.complaints.append(f"{job_id} is {record and record.status} in RQ")


def lasting_keys(redis: Redis) -> list[str]:
    """Return the keys without an expiry, but for RQ's own sets of names."""
    names: list[bytes] = list(redis.scan_iter(count=1000))
    with redis.pipeline(transaction=False) as pipeline:
        for name in names:
            pipeline.ttl(name)
        ttls = pipeline.execute()
    pairs = zip(names, ttls, strict=True)
    lasting = (name.decode("utf-8", "replace") for name, ttl in pairs if ttl == -1)
    return [name for name in lasting if not name.startswith(("rq:queues", "rq:workers"))]


def _fault_of_end(entries: list[StreamEntry]) -> str | None:
    ends = [entry.event for entry in entries if isinstance(entry.event, END_TYPES)]
    if not ends:
        return "lost: no end"
    if len(ends) > 1 or not entries[-1].is_end:
        return "duplicated: something follows the end"
    if not isinstance(ends[0], Finished):
        return f"lost: ended as {ends[0]}"
    return None
