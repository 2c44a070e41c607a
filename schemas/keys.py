"""Every name on the Redis wire, and nothing else."""

import hashlib

from .job import GenerationJob, Priority

JOB_FUNCTION = "headwater.generate"
"""The function name of our RQ jobs. A constant that the worker checks and never imports."""

PRIORITIES = (Priority.HIGH, Priority.NORMAL, Priority.LOW)
"""In the order in which they are claimed."""


def queue_name(model: str, priority: Priority, namespace: str) -> str:
    """Return the RQ queue's name (RQ puts its own prefix before it)."""
    return f"{model}.{priority.value}.{namespace}"


def job_queue_name(job: GenerationJob) -> str:
    """Return the name of the RQ queue that *job* belongs to."""
    return queue_name(job.model, job.priority, job.namespace)


def active_queues_key(model: str) -> str:
    """Return the set of queue names that hold or held jobs for *model*."""
    return f"headwater:queues:{model}"


def idle_queues_key() -> str:
    """Return the queues that had jobs lately, by when RQ's records of those have expired.

    Scores are Redis' Unix seconds. For onlookers: nobody looks for work there.
    """
    return "headwater:idle-queues"


CACHE_BELL = b"cache"
"""What the bell says when it is about the caches, which an ordinary look does not look at."""


def bell_channel(model: str) -> str:
    """Return the pub/sub channel that rings when there is something to look at for *model*.

    Most messages are empty: they say nothing but that. Whoever misses one finds out a little
    later by looking.
    """
    return f"headwater:bell:{model}"


def stream_key(job_id: str) -> str:
    """Return the job's event stream."""
    return f"headwater:events:{job_id}"


def attempt_key(job_id: str) -> str:
    """Return the job's attempt counter; it outlives the stream."""
    return f"headwater:attempt:{job_id}"


def cancel_key(job_id: str) -> str:
    """Return the durable wish to cancel the job."""
    return f"headwater:cancel:{job_id}"


def worker_key(worker_id: str) -> str:
    """Return the worker's lease: it exists as long as the worker is alive."""
    return f"headwater:worker:{worker_id}"


def workers_key() -> str:
    """Return the ids of the workers that may be alive, by when their leases have surely lapsed.

    Scores are Redis' Unix milliseconds. It may name one that has died: the lease decides.
    """
    return "headwater:workers"


def cache_report_key(worker_id: str) -> str:
    """Return what the worker says of its caches (CacheReport); it lapses with the lease."""
    return f"headwater:cache:{worker_id}"


def cache_clear_key(worker_id: str) -> str:
    """Return the durable wish (CacheClear) that the worker empties its caches."""
    return f"headwater:cache-clear:{worker_id}"


def model_card_key(model: str) -> str:
    """Return the card (ModelCard) of the model behind an alias."""
    return f"headwater:model:{model}"


def models_key() -> str:
    """Return the aliases that have a card, by when it expires (Redis' Unix seconds)."""
    return "headwater:models"


def tokenizer_key(fingerprint: str) -> str:
    """Return the tokenizer files that belong to a fingerprint."""
    return f"headwater:tokenizer:{fingerprint}"


def quarantine_key(model: str) -> str:
    """Return the list of ids whose jobs could not be read."""
    return f"headwater:quarantine:{model}"


def idempotency_key(namespace: str, key: str) -> str:
    """Return the record of an idempotent submit; *key* is hashed, so it may hold anything."""
    digest = hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()[:32]
    return f"headwater:idempotency:{namespace}:{digest}"
