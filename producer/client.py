"""Producer: submit jobs, cancel them, read their text."""

import secrets
import uuid
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Self

from headwater.schemas import EntryId, GenerationJob, JobKind, ModelCard, keys, limits
from redis import Redis

from .client_cancel import CancelOutcome, cancel_job
from .client_idempotency import Record, payload_digest
from .client_queue import JobQueue, job_key, queue_names
from .connection import connect
from .errors import DuplicateJob, InvalidRequest, ProducerError, QueueFull, ServerUnavailable
from .grammar_check import check_grammar
from .models import ModelDirectory, fit_to_card
from .patience import OUTAGE_S, Patience
from .result import GenerationResult, collect
from .tail import TailItem, tail

_CHUNK = 256
"""Jobs per transaction of submit_many: large enough for speed, small enough for the server."""


def new_job(model: str, prompt_token_ids: Sequence[int], **fields: Any) -> GenerationJob:
    """Return a job with an id of its own; *fields* are GenerationJob's others.

    Raises SchemaError that names each wrong field.
    """
    values = {"job_id": uuid.uuid4().hex, **fields}
    return GenerationJob.parse(
        {"model": model, "prompt_token_ids": tuple(prompt_token_ids), **values}
    )


def new_score_job(
    model: str,
    prompt_token_ids: Sequence[int],
    continuations: Iterable[Sequence[int]],
    **fields: Any,
) -> GenerationJob:
    """Return a job that asks how likely each continuation (token ids) of the prompt is.

    Its end holds `scores`. Raises SchemaError that names each wrong field.
    """
    values = {"kind": JobKind.SCORE, "continuations": tuple(map(tuple, continuations)), **fields}
    return new_job(model, prompt_token_ids, max_tokens=1, **values)


def new_embedding_job(model: str, prompt_token_ids: Sequence[int], **fields: Any) -> GenerationJob:
    """Return a job that asks for the prompt as a vector; its end holds `embedding`.

    *fields* may say `pooling` and `normalize`. Raises SchemaError that names each wrong field.
    """
    return new_job(model, prompt_token_ids, max_tokens=1, kind=JobKind.EMBEDDING, **fields)


@dataclass(frozen=True, slots=True)
class SubmitSettings:
    """Limits of a Producer."""

    max_queue_depth: int | None = None
    """Jobs that may wait in one queue. Submitters that race each other may overshoot it by
    what they hold in hand."""
    check_model: bool = True
    """Whether jobs are checked against the card of their model. Without it a job for an unknown
    alias waits until a worker with that alias comes."""
    idempotency_ttl_s: int = 24 * 3600
    """How long a second submit under the same key is recognized."""
    outage_s: float = OUTAGE_S
    """How long a call waits for a server that is away. Every call here may be sent again: jobs
    have ids, so that a second submit finds the first one's jobs."""


class Producer:
    """The caller's side of a queue. Safe to share between threads."""

    def __init__(self, redis: Redis | str | None = None, settings: SubmitSettings | None = None):
        """Use a client, or connect to a URL, or to this user's running embedded server."""
        self._owns_redis = not isinstance(redis, Redis)
        self._settings = settings or SubmitSettings()
        outage_s = self._settings.outage_s
        self.redis = redis if isinstance(redis, Redis) else connect(redis, outage_s)
        if self.redis.get_encoder().decode_responses:
            raise ServerUnavailable("give a client without decode_responses: jobs are bytes")
        self.models = ModelDirectory(self.redis, outage_s)
        self._queue = JobQueue(self.redis)

    def close(self) -> None:
        """Close the connection, unless the caller gave it."""
        if self._owns_redis:
            self.redis.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def submit(
        self,
        job: GenerationJob,
        *,
        idempotency_key: str | None = None,
        card: ModelCard | None = None,
    ) -> str:
        """Enqueue *job* and return its id.

        With *idempotency_key*: a second submit of the same request under the same key returns
        the first one's id, and raises IdempotencyConflict for another request. *card* stands in
        for the one that the worker announced. Raises InvalidRequest and its kinds, QueueFull.
        """
        if idempotency_key is None:
            return self._push([self._prepare(job, card)])[0]
        record = Record(job.job_id, payload_digest(job))
        return self._push_once(self._prepare(job, card), record, idempotency_key)

    def submit_many(
        self, jobs: Iterable[GenerationJob], *, card: ModelCard | None = None
    ) -> list[str]:
        """Enqueue *jobs*, many in one round trip, and return their ids in order.

        A ProducerError stops at the transaction that it concerns: the jobs of those before it
        are submitted, and its `submitted` attribute holds their ids.
        """
        submitted: list[str] = []
        remaining = iter(jobs)
        try:
            while chunk := [self._prepare(job, card) for job in islice(remaining, _CHUNK)]:
                submitted += self._push(chunk)
        except ProducerError as error:
            error.submitted = tuple(submitted)
            raise
        return submitted

    def cancel(self, job_id: str) -> CancelOutcome:
        """Cancel a job; harmless when repeated."""
        return cancel_job(self.redis, self._queue, job_id, self._settings.outage_s)

    def tail(self, job_id: str, after: EntryId | None = None) -> Iterator[TailItem]:
        """Yield what the job writes, from its start or after an entry id. See tail.tail."""
        return tail(self.redis, job_id, after)

    def result(self, job_id: str) -> GenerationResult:
        """Wait for the job's end and return its whole text."""
        return collect(self.tail(job_id))

    def _prepare(self, job: GenerationJob, card: ModelCard | None) -> GenerationJob:
        if card is not None:
            job = fit_to_card(job, card)
        elif self._settings.check_model:
            job = self._fit(job)
        if job.is_enforced:
            check_grammar(job)
        if job.sampling.seed is None:
            seed = secrets.randbelow(limits.MAX_SEED + 1)
            job = job.model_copy(
                update={"sampling": job.sampling.model_copy(update={"seed": seed})}
            )
        return job

    def _fit(self, job: GenerationJob) -> GenerationJob:
        try:
            return fit_to_card(job, self.models.card(job.model))
        except InvalidRequest:
            # The card that we keep may be older than the worker that serves the alias now.
            return fit_to_card(job, self.models.card(job.model, refresh=True))

    def _push(self, jobs: list[GenerationJob]) -> list[str]:
        ids = [job.job_id for job in jobs]
        job_keys = [job_key(job_id) for job_id in ids]
        if len(set(ids)) < len(ids):
            raise DuplicateJob("a job id appears twice among the jobs to submit")
        was_sent = False
        patience = Patience(self._settings.outage_s)
        pipeline: Any  # redis-py leaves half of it untyped
        while True:
            # Again also where the connection breaks: after a lost reply the jobs may be there, by
            # us. A new pipeline each time: a broken one is in no state to be used.
            with patience, self.redis.pipeline() as pipeline:
                # RQ would overwrite a job of the same id, even a running one.
                pipeline.watch(*job_keys)
                if pipeline.exists(*job_keys):
                    if was_sent and self._queue.holds(pipeline, jobs):
                        return ids
                    raise DuplicateJob(f"job {self._first_existing(ids)} exists already")
                self._check_depth(pipeline, jobs)
                pipeline.multi()
                self._queue.push(pipeline, jobs)
                was_sent = True
                pipeline.execute()
                return ids

    def _push_once(self, job: GenerationJob, record: Record, idempotency_key: str) -> str:
        record_key = keys.idempotency_key(job.namespace, idempotency_key)
        patience = Patience(self._settings.outage_s)
        pipeline: Any  # redis-py leaves half of it untyped
        while True:
            # Somebody was quicker, or the connection broke: look again.
            with patience, self.redis.pipeline() as pipeline:
                pipeline.watch(record_key)
                known = Record.parse(pipeline.get(record_key))
                if known is not None:
                    known.check(record, idempotency_key)
                    job = job.model_copy(update={"job_id": known.job_id})
                pipeline.watch(job_key(job.job_id))
                if pipeline.exists(job_key(job.job_id)):
                    if known is not None:
                        return known.job_id
                    raise DuplicateJob(f"job {job.job_id} exists already")
                self._check_depth(pipeline, [job])
                pipeline.multi()
                stored = record._replace(job_id=job.job_id).encode()
                pipeline.set(record_key, stored, ex=self._settings.idempotency_ttl_s)
                self._queue.push(pipeline, [job])
                pipeline.execute()
                return job.job_id

    def _check_depth(self, pipeline: Any, jobs: list[GenerationJob]) -> None:
        limit = self._settings.max_queue_depth
        if limit is None:
            return
        names = queue_names(jobs)
        for name, depth in zip(names, self._queue.depths(pipeline, names), strict=True):
            num_new = sum(keys.job_queue_name(job) == name for job in jobs)
            if depth + num_new > limit:
                raise QueueFull(
                    f"queue {name} holds {depth} jobs; {num_new} more would exceed its limit of"
                    f" {limit}: submit later"
                )

    def _first_existing(self, job_ids: list[str]) -> str:
        return next((i for i in job_ids if self.redis.exists(job_key(i))), "of the same id")
