"""The wire format as JSON Schemas, for consumers in other languages."""

import json
from typing import Any

from pydantic import TypeAdapter

from .cache_report import CacheClear, CacheReport
from .events import Event
from .job import GenerationJob
from .model_card import ModelCard
from .worker_status import WorkerStatus

_EXPORTED = {
    "generation_job": GenerationJob,
    "event": Event,
    "model_card": ModelCard,
    "worker_status": WorkerStatus,
    "cache_report": CacheReport,
    "cache_clear": CacheClear,
}


def json_schemas() -> dict[str, str]:
    """Return the text of each exported schema by its file name."""
    return {f"{name}.json": _render(kind) for name, kind in _EXPORTED.items()}


def _render(kind: Any) -> str:
    schema = TypeAdapter(kind).json_schema(mode="validation")
    return json.dumps(schema, indent=2, sort_keys=True, ensure_ascii=False) + "\n"
