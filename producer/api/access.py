"""Who calls, and whether they may: keys and rate limits, as dependencies of the routes."""

import time
from typing import Annotated

from fastapi import Depends, Request

from ..job_view import JobView, read_jobs
from ..openai_protocol.caller import ANYONE, Caller
from ..openai_protocol.errors import ApiError
from .batch_runner import BatchRunner
from .services import Services


def services_of(request: Request) -> Services:
    """Return what the server's routes share."""
    services: Services = request.app.state.services
    return services


ServicesOf = Annotated[Services, Depends(services_of)]


async def caller_of(request: Request, services: ServicesOf) -> Caller:
    """Return whose key came with the request, and count it; raises ApiError 401 and 429."""
    if services.key_file is None:
        return ANYONE
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer" or not key.strip():
        raise ApiError(
            401, "no API key: send `Authorization: Bearer <key>`", code="missing_api_key"
        )
    caller = services.key_file.find(key.strip())
    if caller is None:
        raise ApiError(401, "unknown API key", code="invalid_api_key")
    request.state.caller = caller.name
    if caller.requests_per_minute is not None:
        _count(services, caller, caller.requests_per_minute)
    return caller


def _count(services: Services, caller: Caller, per_minute: int) -> None:
    wait_s = services.rate_limit.wait_s(caller.name, per_minute, time.monotonic())
    if wait_s > 0:
        raise ApiError(
            429,
            f"over {per_minute} requests a minute; try again in {wait_s:.1f} s",
            code="rate_limit_exceeded",
            retry_after_s=wait_s,
        )


CallerOf = Annotated[Caller, Depends(caller_of)]


def find_job(services: Services, caller: Caller, job_id: str) -> JobView:
    """Return a job that the caller may see; raises ApiError 404. Reads Redis: not on the loop."""
    (view,) = services.look(lambda redis: read_jobs(redis, [job_id]))
    if view is None or not (caller.may_choose or view.namespace == caller.namespace):
        # The same words for others' jobs: ids must not be probed.
        raise ApiError(404, f"no such job: {job_id!r}", code="job_not_found")
    return view


def namespace_of(caller: Caller) -> str | None:
    """Return the namespace that the caller sees; None for all."""
    return None if caller.may_choose else caller.namespace


def batches_of(request: Request) -> BatchRunner:
    """Return the server's batches."""
    batches: BatchRunner = request.app.state.batches
    return batches


BatchesOf = Annotated[BatchRunner, Depends(batches_of)]
