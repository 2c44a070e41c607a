"""/v1/completions and /v1/chat/completions."""

import asyncio
import time

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from headwater.schemas import GenerationJob

from ..openai_protocol.caller import Caller
from ..openai_protocol.echo import Echo, echoes, with_echo
from ..openai_protocol.prompt_stream import PromptStream
from ..openai_protocol.replies import Reply, whole_reply
from ..openai_protocol.reply_formats import ChatFormat, CompletionFormat, ReplyFormat
from ..openai_protocol.requests import ChatRequest, CompletionRequest, jobs_of
from . import sse
from .access import CallerOf, ServicesOf
from .reply_stream import ReplyStream
from .services import Services
from .waiting import CLIENT_LEFT, results

router = APIRouter()

JOB_HEADER = "X-Headwater-Job"
"""Names the jobs of a reply, so that their events can be read on after a lost connection."""


@router.post("/v1/completions", response_model=None)
async def completions(
    body: CompletionRequest, request: Request, services: ServicesOf, caller: CallerOf
) -> Response:
    """Complete one or many prompts."""
    return await _answer(body, CompletionFormat(), request, services, caller)


@router.post("/v1/chat/completions", response_model=None)
async def chat_completions(
    body: ChatRequest, request: Request, services: ServicesOf, caller: CallerOf
) -> Response:
    """Answer a chat."""
    return await _answer(body, ChatFormat(), request, services, caller)


async def _answer(
    body: CompletionRequest | ChatRequest,
    form: ReplyFormat,
    request: Request,
    services: Services,
    caller: Caller,
) -> Response:
    jobs = await asyncio.to_thread(jobs_of, body, services.models, caller)
    job_ids = await services.submit(caller, jobs)
    request.state.job_ids = job_ids
    include_usage = body.stream_options is not None and body.stream_options.include_usage
    num_choices = jobs[0].sampling.n
    reply = Reply(
        form,
        body.model,
        job_ids,
        int(time.time()),
        include_usage,
        num_choices,
        tells_prompt=body.prompt_logprobs is not None,
    )
    echo = _echoes(body, jobs, services)
    if not body.stream:
        return await _whole(reply, request, services, echo, cancels=body.cancels_on_disconnect)
    prompts = _prompt_streams(reply, jobs, echo)
    stream = ReplyStream(services, reply, prompts, cancels=body.cancels_on_disconnect)
    return sse.EventStream(stream.events(), _headers(job_ids), stream.close)


def _headers(job_ids: list[str]) -> dict[str, str]:
    return {JOB_HEADER: ",".join(job_ids)}


def _echoes(
    body: CompletionRequest | ChatRequest, jobs: list[GenerationJob], services: Services
) -> list[Echo] | None:
    if not isinstance(body, CompletionRequest) or not body.echo:
        return None
    return echoes(body.prompt, jobs, services.models.tokenizer(body.model))


async def _whole(
    reply: Reply, request: Request, services: Services, echo: list[Echo] | None, *, cancels: bool
) -> Response:
    found = await results(request, services, reply.job_ids, cancels=cancels)
    if found is None:
        return Response(status_code=CLIENT_LEFT)
    answer = whole_reply(reply, found)
    if echo is not None:
        jobs = (choice["index"] // reply.num_choices for choice in answer["choices"])
        answer["choices"] = [
            with_echo(choice, echo[job], found[job].prompt_logprobs)
            for job, choice in zip(jobs, answer["choices"], strict=True)
        ]
    return JSONResponse(answer, headers=_headers(reply.job_ids))


def _prompt_streams(
    reply: Reply, jobs: list[GenerationJob], echo: list[Echo] | None
) -> dict[int, PromptStream]:
    if echo is None and not reply.tells_prompt:
        return {}
    return {
        number: PromptStream(job, echo[number] if echo else None, tells_prompt=reply.tells_prompt)
        for number, job in enumerate(jobs)
    }
