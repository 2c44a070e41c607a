"""Claimer: one job out of its queue, into an execution and an attempt of ours."""

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import structlog
from headwater.schemas import (
    Cancelled,
    End,
    EntryId,
    Expired,
    Failed,
    GenerationJob,
    SchemaError,
    Started,
    keys,
    limits,
)
from redis import Redis
from redis.exceptions import RedisError, ResponseError, WatchError
from rq.job import JobStatus

from ..booking.finalize import Finalizer, record_end
from ..booking.rq_jobs import RQBook, RunningJob, job_keys, read_record
from ..messages import Claim
from ..redis_client import is_passing
from ..streams import Begun, Ended, JobStreams, history_of
from .payload import FIELDS, QueuedJob, read_job
from .settings import IntakeSettings

log = structlog.get_logger()

_JOB_ID = re.compile(rf"[A-Za-z0-9_-]{{1,{limits.MAX_JOB_ID_CHARS}}}")
_MAX_STRIKES = 3
_MAX_QUARANTINED = 10_000


class ClaimPostponed(Exception):
    """The first job of the queue must not run here now; it is left where it is."""


class StartedJob(NamedTuple):
    """A job that RQ books as running here; its attempt has perhaps not begun."""

    running: RunningJob
    queued: QueuedJob


class Claimer:
    """Claims jobs. Not shared between threads.

    Every call may fail with a passing RedisError; nothing is lost by that. A job whose start
    may have been booked is kept, and `resume` goes on with it.
    """

    def __init__(
        self,
        redis: Redis,
        book: RQBook,
        settings: IntakeSettings,
        *,
        is_held: Callable[[str], bool],
        on_end: Callable[[End], None] = lambda _: None,
    ) -> None:
        """*is_held* tells whether the engine has not yet let go of a job that we lost.

        *on_end* is told of jobs that end here, without having been run.
        """
        self._is_held = is_held
        self._on_end = on_end
        self._redis = redis
        self._book = book
        self._settings = settings
        self._streams = JobStreams(redis)
        self._finalizer = Finalizer(redis, book, stream_ttl_ms=settings.stream_ttl_ms)
        self._unsettled: list[StartedJob] = []

    def claim(
        self, queue_name: str, accept: Callable[[Claim], None], *, with_strikes: bool = True
    ) -> int | None:
        """Take the queue's first job and hand its claim to *accept*.

        Returns how many tokens the job may take; 0 where it could not be run (it is dealt with
        then), None where the queue is empty. Raises ClaimPostponed, and leaves the job where it
        is, if it has strikes and not *with_strikes*, or is still held here.
        """
        names = job_keys("", queue_name)
        # LMOVE, one queue at a time: with several, RQ would pop, and a crash would lose the job.
        found: Any = self._redis.lmove(names.queue, names.intermediate)
        if found is None:
            return None
        job_id = bytes(found).decode("utf-8", "replace")
        if not _JOB_ID.fullmatch(job_id):
            self._quarantine(queue_name, found, "its id is none of ours")
            return 0
        if self._is_held(job_id) or (not with_strikes and self._has_strikes(job_id)):
            self._put_back(found, queue_name)
            raise ClaimPostponed
        try:
            started = self._start(job_id, queue_name)
        except ResponseError as error:
            if is_passing(error):
                raise
            # Its key holds something that is no hash: RQ has nothing to be told of.
            self._close_stream(job_id, f"RQ's record is broken: {error}")
            self._quarantine(queue_name, found, str(error))
            return 0
        if started is None:
            return 0
        self._settle(started, accept)
        job = started.queued.job
        return job.num_tokens_in_all

    def resume(self, accept: Callable[[Claim], None]) -> None:
        """Go on with jobs that an outage caught between their start and their attempt."""
        while self._unsettled:
            started = self._unsettled[0]
            record = read_record(self._redis, started.running)
            self._unsettled.pop(0)
            # Where the start was never booked, the job is still between the queues.
            if record.is_executing:
                self._settle(started, accept)

    # From the queue to an execution.

    def _has_strikes(self, job_id: str) -> bool:
        try:
            return self._streams.has_strikes(job_id)
        except (ResponseError, SchemaError) as error:
            if isinstance(error, RedisError) and is_passing(error):
                raise
            # Broken: the claim itself deals with it.
            return False

    def _put_back(self, raw: Any, queue_name: str) -> None:
        names = job_keys("", queue_name)
        with self._redis.pipeline() as pipeline:
            pipeline.lrem(names.intermediate, 1, raw)
            pipeline.lpush(names.queue, raw)
            pipeline.execute()

    def _start(self, job_id: str, queue_name: str) -> StartedJob | None:
        names = job_keys(job_id, queue_name)
        pipeline: Any  # redis-py leaves half of it untyped
        with self._redis.pipeline() as pipeline:
            while True:
                pipeline.watch(names.job)
                if pipeline.hstrlen(names.job, "data") > limits.MAX_COMPRESSED_PAYLOAD_BYTES:
                    self._refuse(job_id, queue_name, "the payload is too large")
                    return None
                data, status, enqueued_at = pipeline.hmget(names.job, FIELDS)
                if status != JobStatus.QUEUED.value.encode():
                    self._skip(pipeline, job_id, queue_name, status)
                    return None
                try:
                    queued = read_job(job_id, data, enqueued_at)
                    self._check_queue(queued.job, queue_name)
                except SchemaError as error:
                    self._refuse(job_id, queue_name, str(error))
                    return None
                pipeline.multi()
                execution_id = self._book.start(
                    pipeline, job_id, queue_name, self._settings.worker_id
                )
                running = RunningJob(job_id, queue_name, execution_id, self._settings.worker_id)
                started = StartedJob(running, queued)
                try:
                    pipeline.execute()
                except WatchError:
                    # The job changed; or the connection broke, and it is started all the same.
                    if self._is_booked(started):
                        return started
                except RedisError:
                    self._unsettled.append(started)
                    raise
                else:
                    return started

    def _is_booked(self, started: StartedJob) -> bool:
        try:
            return read_record(self._redis, started.running).is_executing
        except RedisError:
            self._unsettled.append(started)
            raise

    def _skip(self, pipeline: Any, job_id: str, queue_name: str, status: bytes | None) -> None:
        """Leave a job alone that is not queued: cancelled, deleted, or listed twice."""
        if status is not None and status.decode("utf-8", "replace") not in set(JobStatus):
            self._refuse(job_id, queue_name, f"its status is {status[:60]!r}")
            return
        pipeline.unwatch()
        pipeline.lrem(job_keys(job_id, queue_name).intermediate, 1, job_id)
        pipeline.execute()
        log.info("skipped", job_id=job_id, status=status)

    @staticmethod
    def _check_queue(job: GenerationJob, queue_name: str) -> None:
        if keys.job_queue_name(job) != queue_name:
            raise SchemaError(
                f"the job belongs to queue {keys.job_queue_name(job)}, it was found in {queue_name}"
            )

    def _refuse(self, job_id: str, queue_name: str, reason: str) -> None:
        """End a job that cannot be read, for its readers first; then in RQ."""
        self._close_stream(job_id, reason)
        with self._redis.pipeline() as pipeline:
            self._book.fail(pipeline, RunningJob(job_id, queue_name, "", ""), reason)
            pipeline.execute()
        self._quarantine(queue_name, job_id.encode(), reason)

    def _close_stream(self, job_id: str, reason: str) -> None:
        end = Failed(code="malformed_job", message=reason)
        try:
            self._streams.close(job_id, end, self._settings.stream_ttl_ms)
        except (ResponseError, SchemaError) as error:
            if isinstance(error, RedisError) and is_passing(error):
                raise
            log.warning("stream_broken", job_id=job_id, error=str(error))
        else:
            self._on_end(end)

    def _quarantine(self, queue_name: str, job_id: bytes, reason: str) -> None:
        log.warning("quarantined", job_id=job_id[:200], queue=queue_name, reason=reason)
        key = keys.quarantine_key(self._settings.model)
        with self._redis.pipeline() as pipeline:
            pipeline.lrem(job_keys("", queue_name).intermediate, 1, job_id)  # type: ignore[arg-type]
            pipeline.lpush(key, job_id)
            pipeline.ltrim(key, 0, _MAX_QUARANTINED - 1)
            pipeline.expire(key, self._settings.retention_s)
            pipeline.execute()

    # From an execution to an attempt.

    def _settle(self, started: StartedJob, accept: Callable[[Claim], None]) -> None:
        try:
            claim = self._begin(started)
        except RedisError as error:
            if is_passing(error):
                self._unsettled.append(started)
                raise
            self._give_up(started, error)
            return
        except SchemaError as error:
            self._give_up(started, error)
            return
        if claim is not None:
            accept(claim)

    def _give_up(self, started: StartedJob, error: Exception) -> None:
        """End a job whose stream or counter holds what none of us wrote."""
        job_id, queue_name = started.running.job_id, started.running.queue_name
        reason = f"the job's stream is broken: {error}"
        self._close_stream(job_id, reason)
        with self._redis.pipeline() as pipeline:
            self._book.fail(pipeline, started.running, reason)
            pipeline.execute()
        self._quarantine(queue_name, job_id.encode(), reason)

    def _begin(self, started: StartedJob) -> Claim | None:
        """Open the attempt; None where the job ends here and now."""
        running, queued = started
        job = queued.job
        fence = Started(
            worker_id=self._settings.worker_id,
            sampler_version=self._settings.sampler_version,
            metadata=job.metadata,
        )
        ttl_ms = self._settings.running_ttl_ms
        begun = self._streams.begin(job.job_id, running.execution_id, fence, ttl_ms)
        if isinstance(begun, Ended):
            self._follow(running, begun)
            return None
        claim = self._claim_of(started, begun)
        end = self._early_end(claim)
        if end is not None:
            log.info("ended_early", job_id=job.job_id, end=end.type, attempt=begun.attempt)
            self._finalizer.close(running, EntryId(begun.attempt, 1), end)
            self._on_end(end)
            return None
        return claim

    def _follow(self, running: RunningJob, ended: Ended) -> None:
        """The stream has an end: RQ's state follows it."""
        with self._redis.pipeline() as pipeline:
            record_end(self._book, pipeline, running, ended.entry.event)  # type: ignore[arg-type]
            pipeline.execute()

    def _claim_of(self, started: StartedJob, begun: Begun) -> Claim:
        running, queued = started
        entries = self._streams.read(queued.job.job_id)
        history = history_of(entries, begun.attempt)
        return Claim(
            job=queued.job,
            queue_name=running.queue_name,
            execution_id=running.execution_id,
            attempt=begun.attempt,
            history=history.parts,
            sampler_version=history.sampler_version,
            first_started_ms=history.first_started_ms or begun.at_ms,
            begun_at_ms=begun.at_ms,
            enqueued_at_ms=queued.enqueued_at_ms,
            strikes=history.strikes,
        )

    def _early_end(self, claim: Claim) -> End | None:
        """Return the end of a job that is not to be run (any more)."""
        job = claim.job
        if self._redis.exists(keys.cancel_key(job.job_id)):
            return Cancelled(metadata=job.metadata)
        is_first = claim.begun_at_ms == claim.first_started_ms
        if is_first and job.expires_at is not None and claim.begun_at_ms >= job.expires_at * 1e3:
            return Expired(metadata=job.metadata)
        if claim.strikes >= _MAX_STRIKES:
            return Failed(
                code="poisoned",
                message=f"its worker died {claim.strikes} times in a row without a new token",
                metadata=job.metadata,
            )
        return None
