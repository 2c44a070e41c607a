"""/healthz, /readyz, /metrics, /v1/status, and the page at /."""

import asyncio
from functools import partial
from pathlib import Path
from typing import Any

from fastapi import APIRouter
from fastapi.responses import HTMLResponse, PlainTextResponse, Response
from prometheus_client import generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from redis import Redis
from redis.exceptions import RedisError

from ..job_view import read_jobs, recent_job_ids
from ..openai_protocol.caller import Caller
from ..status import read_status
from .access import CallerOf, ServicesOf
from .gauges import read_gauges
from .job_routes import job_object

router = APIRouter()

_RECENT_JOBS = 20
_PAGE = Path(__file__).with_name("page.html")


@router.get("/healthz")
async def alive() -> PlainTextResponse:
    """Say that the process answers."""
    return PlainTextResponse("ok\n")


@router.get("/readyz")
async def ready(services: ServicesOf) -> PlainTextResponse:
    """Say whether jobs can be submitted."""
    if services.is_stopping:
        return PlainTextResponse("stopping\n", 503)
    try:
        await asyncio.to_thread(services.redis.ping)
    except RedisError as error:
        return PlainTextResponse(f"no answer from Redis: {error}\n", 503)
    return PlainTextResponse("ok\n")


@router.get("/metrics")
async def metrics(services: ServicesOf) -> Response:
    """Return the figures for Prometheus."""
    await asyncio.to_thread(read_gauges, services.redis, services.metrics)
    return Response(generate_latest(services.metrics.registry), media_type=CONTENT_TYPE_LATEST)


@router.get("/v1/status")
async def status(services: ServicesOf, caller: CallerOf) -> dict[str, Any]:
    """Return queues, workers and recent jobs, as far as they are the caller's."""
    return await asyncio.to_thread(services.look, partial(_status, caller))


@router.get("/", include_in_schema=False)
async def page() -> HTMLResponse:
    """Return the built-in page; it holds no data, and asks for them with the user's key."""
    # It loads nothing from elsewhere, and nothing may be slipped into it.
    policy = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    headers = {"Content-Security-Policy": policy + "connect-src 'self'; img-src data:"}
    return HTMLResponse(await asyncio.to_thread(_PAGE.read_text, "utf-8"), headers=headers)


def _status(caller: Caller, redis: Redis) -> dict[str, Any]:
    found = read_status(redis)
    queues = [
        queue
        for queue in found.queues
        if caller.may_choose or queue.name.rpartition(".")[2] == caller.namespace
    ]
    ids = recent_job_ids(redis, [queue.name for queue in queues], _RECENT_JOBS)
    jobs = [view for view in read_jobs(redis, ids) if view is not None]
    return {
        "queues": [queue._asdict() for queue in queues],
        "workers": [
            worker.status.model_dump(mode="json", exclude={"host", "pid", "source"})
            | {"heartbeat_age_s": worker.heartbeat_age_s}
            for worker in found.workers
        ],
        "jobs": [_without_text(job_object(view)) for view in jobs],
    }


def _without_text(job: dict[str, Any]) -> dict[str, Any]:
    for choice in (job["end"] or {}).get("choices", ()):
        choice.pop("text", None)
    return job
