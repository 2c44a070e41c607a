"""/v1/completions and /v1/chat/completions."""

import asyncio
import time
from collections import defaultdict
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from headwater.schemas import Finished, GenerationJob, HeadwaterError, Usage
from headwater.schemas.logprobs import PositionLogprobs

from ..openai_protocol.caller import Caller
from ..openai_protocol.echo import Echo, echoes, with_echo
from ..openai_protocol.errors import ApiError, of_any, of_end
from ..openai_protocol.replies import (
    ChatFormat,
    CompletionFormat,
    Reply,
    ReplyFormat,
    total,
    whole_reply,
)
from ..openai_protocol.requests import ChatRequest, CompletionRequest, jobs_of
from ..stream_reader import Ended, Output, Restart
from . import sse
from .access import CallerOf, ServicesOf
from .feed import Feed, FeedItem, Stopped
from .services import Services
from .steady_text import SteadyText
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
    if not body.stream:
        echo = _echoes(body, jobs, services)
        return await _whole(reply, request, services, echo, cancels=body.cancels_on_disconnect)
    stream = _ReplyStream(services, reply, cancels=body.cancels_on_disconnect)
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


@dataclass(slots=True)
class _ReplyStream:
    """One streamed reply: its events, and what happens when it ends or its client leaves."""

    services: Services
    reply: Reply
    cancels: bool
    _feed: Feed | None = None
    _is_over: bool = False
    _usages: list[Usage] = field(default_factory=list)
    _texts: defaultdict[int, SteadyText] = field(default_factory=lambda: defaultdict(SteadyText))
    _num_told: dict[int, int] = field(default_factory=dict)
    """By choice: tokens whose logprobs have been sent."""
    _entry: list[dict[str, Any]] = field(default_factory=list)
    """Chunks of the entry that is being read: the last of them will carry its id."""

    async def events(self) -> AsyncIterator[bytes]:
        """Yield the reply's events; an error after the first one is an event, too."""
        self._feed = self.services.open_feed(self.reply.job_ids)
        try:
            while len(self._usages) < len(self.reply.job_ids):
                found = await self._feed.next(self.services.settings.keepalive_s)
                for event in (sse.KEEP_ALIVE,) if found is None else self._take(found):
                    yield event
            yield sse.DONE
        except Stopped:
            yield sse.event(ApiError(503, "the server stops", code="server_stopping").body())
        except HeadwaterError as error:
            yield sse.event(of_any(error).body())
        self._is_over = True

    def close(self) -> None:
        """Let go of the jobs, and cancel them where the client left before their end."""
        if self._feed is None:
            # The client was gone before the first event.
            self._is_over = False
        else:
            self.services.close_feed(self._feed)
        if self.cancels and not self._is_over and not self.services.is_stopping:
            self.services.cancel_later(self.reply.job_ids)

    def _take(self, found: FeedItem) -> list[bytes]:
        job, item = found
        if isinstance(item, Restart):
            self._texts[job].restart()
        elif isinstance(item, Output):
            return self._output(job, item)
        elif isinstance(item, Ended):
            return self._end(job, item)
        return []

    def _output(self, job: int, output: Output) -> list[bytes]:
        taken = (self._texts[job].take(output.choice, span) for span in output.text)
        spans = [span for span in taken if span is not None]
        index = self.reply.index(job, output.choice)
        positions = self._untold(index, output)
        if spans or positions:
            self._entry.append(self.reply.chunk(index, spans, None, positions))
        return self._flush(output) if output.is_last else []

    def _untold(self, index: int, output: Output) -> tuple[PositionLogprobs, ...]:
        # A job that starts over tells its tokens again.
        num_told = self._num_told.get(index, 0)
        positions = (output.logprobs or ())[max(0, num_told - output.start) :]
        self._num_told[index] = num_told + len(positions)
        return positions

    def _end(self, job: int, ended: Ended) -> list[bytes]:
        if not isinstance(ended.event, Finished):
            raise of_end(ended.event)
        self._texts[job].finish()
        self._usages.append(ended.event.usage)
        for choice in ended.event.choices:
            index = self.reply.index(job, choice.choice)
            self._entry.append(self.reply.chunk(index, (), choice.finish_reason))
        if self.reply.include_usage and len(self._usages) == len(self.reply.job_ids):
            self._entry.append(self.reply.usage_chunk(total(self._usages)))
        return self._flush(ended)

    def _flush(self, item: Output | Ended) -> list[bytes]:
        # Ids of several jobs would be of no use to anybody.
        entry_id = item.id if len(self.reply.job_ids) == 1 else None
        if not self._entry:
            return []
        *first, last = self._entry
        self._entry = []
        return [*map(sse.event, first), sse.event(last, entry_id=entry_id)]
