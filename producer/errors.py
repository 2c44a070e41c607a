"""The producer's exception hierarchy.

* ProducerError (HeadwaterError)
  x ServerUnavailable       no server, wrong password, a server that does not answer
  x NoWorker                no worker serves the alias
  x QueueFull               the queue holds its limit already: submit later
  x InvalidRequest          the request is at fault: the same one fails again
    + UnknownModel          no worker has announced this alias
    + PromptTooLong         prompt and new tokens don't fit the model's context
    + PayloadTooLarge       the job is above the wire format's size limit
    + UnsupportedToolChoice the model's tool calls can't be forced
    + TokenizationError     messages that the chat template refuses, tokenizer files that are bad
    + IdempotencyConflict   the key was used for another request
    + DuplicateJob          the job id exists already
  x StreamError             a stream that can't be read on
    + UnknownJob            never submitted, or expired together with its stream
    + StreamExpired         the job is known, its stream is gone
    + JobLost               RQ ended the job and nobody wrote an end; submit it again
    + StreamGap             entries, tokens or characters are missing
    + StreamDiverged        an attempt said something else than the one before it
"""

from headwater.schemas import HeadwaterError


class ProducerError(HeadwaterError):
    """Base of what the producer raises."""

    submitted: tuple[str, ...] = ()
    """On an error of submit_many: the ids of the jobs that are on their way all the same."""


class ServerUnavailable(ProducerError):
    """The Redis or Valkey server can't be reached or refuses us."""


class NoWorker(ProducerError):
    """No worker serves the alias, or none takes jobs."""


class QueueFull(ProducerError):
    """The queue is at its limit; nothing was submitted, try again later."""


class InvalidRequest(ProducerError):
    """The request can't be served as it is; nothing was submitted."""


class UnknownModel(InvalidRequest):
    """No worker has announced this model alias."""


class PromptTooLong(InvalidRequest):
    """The prompt and max_tokens together exceed the model's context."""


class UnsupportedToolChoice(InvalidRequest):
    """The model writes its tool calls in a form that can't be enforced."""


class PayloadTooLarge(InvalidRequest):
    """The job's payload is above the limit of the wire format."""


class TokenizationError(InvalidRequest):
    """Text or messages that can't be turned into token ids."""


class IdempotencyConflict(InvalidRequest):
    """The idempotency key belongs to a request with another payload."""


class DuplicateJob(InvalidRequest):
    """A job with this id exists already."""


class StreamError(ProducerError):
    """A job's event stream can't be read on."""


class UnknownJob(StreamError):
    """There is no such job: never submitted, or expired."""


class StreamExpired(StreamError):
    """The job is known but its stream is gone."""


class JobLost(StreamError):
    """The job ended without an end in its stream. Retryable: submit it again."""


class StreamGap(StreamError):
    """Entries, tokens or characters are missing from the stream."""


class StreamDiverged(StreamError):
    """Two attempts disagree about the same tokens or characters."""
