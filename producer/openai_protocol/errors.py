"""ApiError: what a client is told, in the shape of OpenAI's errors."""

from typing import Any

from headwater.schemas import Failed, HeadwaterError, SchemaError

from ..errors import (
    DuplicateJob,
    IdempotencyConflict,
    InvalidRequest,
    JobLost,
    PayloadTooLarge,
    ProducerError,
    PromptTooLong,
    QueueFull,
    ServerUnavailable,
    StreamExpired,
    UnknownJob,
    UnknownModel,
    UnsupportedToolChoice,
)

RETRY_AFTER_S = 5
"""What a client is told to wait for a place in the queue, or for the server to come back."""


class ApiError(HeadwaterError):
    """An error with an HTTP status and OpenAI's `code` and `param`."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param
        self.retry_after_s = retry_after_s

    @property
    def headers(self) -> dict[str, str]:
        """The headers that belong to the answer."""
        if self.retry_after_s is None:
            return {}
        # Whole seconds, and never 0: "now" would be a busy loop.
        return {"Retry-After": str(max(1, round(self.retry_after_s + 0.5)))}

    def body(self) -> dict[str, Any]:
        """Return the answer's body."""
        return {
            "error": {
                "message": str(self),
                "type": _type_of(self.status),
                "param": self.param,
                "code": self.code,
            }
        }


def _type_of(status: int) -> str:
    named = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
    return named.get(status, "invalid_request_error" if status < 500 else "server_error")


_STATUS: tuple[tuple[type[ProducerError], int, str], ...] = (
    (ServerUnavailable, 503, "queue_unavailable"),
    (QueueFull, 429, "queue_full"),
    (UnknownModel, 404, "model_not_found"),
    (PromptTooLong, 400, "context_length_exceeded"),
    (PayloadTooLarge, 413, "payload_too_large"),
    (IdempotencyConflict, 409, "idempotency_conflict"),
    (DuplicateJob, 409, "duplicate_job"),
    (UnsupportedToolChoice, 422, "unsupported_tool_choice"),
    (InvalidRequest, 400, "invalid_request"),
    (UnknownJob, 404, "job_not_found"),
    (StreamExpired, 410, "stream_expired"),
    (JobLost, 500, "job_lost"),
)
"""The first kind that fits decides."""


def of_producer(error: ProducerError) -> ApiError:
    """Return what a client is told of *error*."""
    for kind, status, code in _STATUS:
        if isinstance(error, kind):
            retry_after_s = RETRY_AFTER_S if status in (429, 503) else None
            return ApiError(status, str(error), code=code, retry_after_s=retry_after_s)
    return ApiError(500, str(error), code="stream_broken")


def of_any(error: HeadwaterError) -> ApiError:
    """Return what a client is told of any error of ours."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, ProducerError):
        return of_producer(error)
    return ApiError(500, str(error), code="internal_error")


def of_schema(error: SchemaError) -> ApiError:
    """Return what a client is told of a job that does not validate."""
    message = str(error).removeprefix("not a GenerationJob: ").replace("sampling.", "")
    name, colon, _ = message.partition(":")
    param = name if colon and name.replace("_", "").replace(".", "").isalnum() else None
    return ApiError(422, message, code="invalid_value", param=param)


# What a worker says that is not its own fault; any other code is a server error.
_FAILURES = {
    "deadline_exceeded": 504,
    "bad_response_format": 400,
    "malformed_job": 400,
    "context_length_exceeded": 400,
    "token_id_out_of_range": 400,
    "tokenizer_mismatch": 409,
}


def of_end(event: Any) -> ApiError:
    """Return what a client is told of a job that did not finish: its failed or other end."""
    if isinstance(event, Failed):
        status = _FAILURES.get(event.code, 503 if event.retryable else 500)
        return ApiError(status, event.message, code=event.code)
    if event.type == "expired":
        return ApiError(504, "the job was still queued when it expired", code="job_expired")
    return ApiError(409, "the job was cancelled", code="job_cancelled")
