"""The worker's entry: settings, logging, and the BLAS, all before anything imports MLX."""

from typing import Any

import structlog
from headwater.schemas.base import describe
from pydantic import ValidationError

from . import log as logs
from .engine import blas
from .errors import StartupError
from .settings import WorkerSettings

log = structlog.get_logger()


def run(**given: Any) -> int:
    """Run a worker with these settings until a signal ends it; return the exit code.

    Raises StartupError, whose message says what to do.
    """
    try:
        settings = WorkerSettings(**given)
    except ValidationError as error:
        raise StartupError(f"bad settings: {describe(error)}") from error
    logs.configure(settings.log_level, json=settings.log_json)
    choice = blas.preload(settings.cpu_threads)
    log.info("starting", model=settings.model, alias=settings.alias, blas=choice.name)
    # Only now: it brings MLX, which must find the BLAS in place.
    from .service import Worker

    return Worker(settings).run()
