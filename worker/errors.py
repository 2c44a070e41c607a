"""The worker's exception tree, under the root that the command line turns into one line.

* HeadwaterError
  + WorkerError
    x JobRejected         the job is at fault: it fails with a code, nothing else is touched
    x EngineUnsound       the engine is at fault: jobs are handed back, the process exits non-zero
    x StartupError        the worker can't start: one line that says what to do
    x LoginRefused        the server lets a running worker in no more: it exits non-zero
"""

from headwater.schemas.errors import HeadwaterError


class WorkerError(HeadwaterError):
    """Base of what the worker raises on purpose."""


class JobRejected(WorkerError):
    """A job that this worker will not run; *code* goes into its `failed` event."""

    def __init__(self, code: str, message: str, *, retryable: bool = False) -> None:
        super().__init__(message)
        self.code = code
        self.retryable = retryable


class EngineUnsound(WorkerError):
    """The engine can't be trusted any more; only a new process helps."""


class StartupError(WorkerError):
    """The worker can't start as it was asked to."""


class LoginRefused(WorkerError):
    """The server has let a running worker in no more, for longer than it waits."""
