"""structlog, configured once: JSON lines in production, key-value on a terminal."""

import logging
import sys
from typing import TextIO

import structlog


def configure(level: str = "info", *, json: bool | None = None, file: TextIO | None = None) -> None:
    """Set up logging for this process; *json* None means: unless *file* is a terminal."""
    file = file or sys.stderr
    as_json = not file.isatty() if json is None else json
    renderer: structlog.typing.Processor = (
        structlog.processors.JSONRenderer() if as_json else structlog.dev.ConsoleRenderer()
    )
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso"),
            *([structlog.processors.format_exc_info] if as_json else []),
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(
            logging.getLevelNamesMapping()[level.upper()]
        ),
        logger_factory=structlog.WriteLoggerFactory(file=file),
    )
