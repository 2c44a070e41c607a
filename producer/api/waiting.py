"""Waiting for jobs on behalf of a client that may leave."""

import asyncio
from collections.abc import Sequence

from fastapi import Request

from ..result import GenerationResult
from .services import Services

CLIENT_LEFT = 499
"""The status for the log of a request whose client has left: nobody reads the reply."""


async def results(
    request: Request, services: Services, job_ids: Sequence[str], *, cancels: bool
) -> list[GenerationResult] | None:
    """Return the jobs' results; None when the client left first, with the jobs cancelled if
    *cancels*.
    """
    waiting = asyncio.gather(*(services.producer.result(job_id) for job_id in job_ids))
    leaving = asyncio.create_task(_disconnect(request))
    try:
        await asyncio.wait((waiting, leaving), return_when=asyncio.FIRST_COMPLETED)
        if waiting.done():
            return waiting.result()
        if cancels:
            services.cancel_later(job_ids)
        return None
    finally:
        waiting.cancel()
        leaving.cancel()


async def _disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
