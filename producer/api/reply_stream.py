"""ReplyStream: a reply of the text routes as server-sent events."""

from collections import defaultdict
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from headwater.schemas import Finished, HeadwaterError, Usage
from headwater.schemas.logprobs import PositionLogprobs

from ..openai_protocol.errors import ApiError, of_any, of_end
from ..openai_protocol.prompt_stream import PromptStream
from ..openai_protocol.replies import Reply, total
from ..stream_reader import Ended, Output, Restart
from . import sse
from .feed import Feed, FeedItem, Stopped
from .services import Services
from .steady_text import SteadyText


@dataclass(slots=True)
class ReplyStream:
    """One streamed reply: its events, and what happens when it ends or its client leaves."""

    services: Services
    reply: Reply
    prompts: Mapping[int, PromptStream]
    """By job, where something of the prompt is told: before the choices' own text."""
    cancels: bool
    _feed: Feed | None = None
    _is_over: bool = False
    _usages: list[Usage] = field(default_factory=list)
    _texts: defaultdict[int, SteadyText] = field(default_factory=lambda: defaultdict(SteadyText))
    _num_told: dict[int, int] = field(default_factory=dict)
    """By choice: tokens whose logprobs have been sent."""
    _entry: list[dict[str, Any]] = field(default_factory=list)
    """Chunks of the entry that is being read: the last of them will carry its id."""
    _held: defaultdict[int, list[Output]] = field(default_factory=lambda: defaultdict(list))
    """By job: what choices gained before the echo of their prompt was out."""

    async def events(self) -> AsyncIterator[bytes]:
        """Yield the reply's events; an error after the first one is an event, too."""
        self._feed = self.services.open_feed(self.reply.job_ids)
        try:
            for event in self._opening():
                yield event
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

    def _opening(self) -> Iterator[bytes]:
        """Yield what of the prompts needs no worker."""
        for job, prompt in self.prompts.items():
            self.reply.begin_at(job, prompt.num_chars)
            yield from map(sse.event, self.reply.prompt_chunks(job, prompt.first()))

    def _take(self, found: FeedItem) -> list[bytes]:
        job, item = found
        if isinstance(item, Restart):
            self._texts[job].restart()
            self._held.pop(job, None)
        elif isinstance(item, Output):
            return self._output(job, item)
        elif isinstance(item, Ended):
            return self._end(job, item)
        return []

    def _output(self, job: int, output: Output) -> list[bytes]:
        prompt = self.prompts.get(job)
        if prompt is not None and output.prompt is not None:
            piece = prompt.take(output.prompt)
            self._entry += [] if piece is None else self.reply.prompt_chunks(job, piece)
        if output.token_ids or output.text:
            self._held[job].append(output)
        if prompt is None or prompt.is_echoed:
            self._tell(job)
        return self._flush(output) if output.is_last else []

    def _tell(self, job: int) -> None:
        for output in self._held.pop(job, ()):
            taken = (self._texts[job].take(output.choice, span) for span in output.text)
            spans = [span for span in taken if span is not None]
            index = self.reply.index(job, output.choice)
            positions = self._untold(index, output)
            if spans or positions:
                self._entry.append(self.reply.chunk(index, spans, None, positions))

    def _untold(self, index: int, output: Output) -> tuple[PositionLogprobs, ...]:
        # A job that starts over tells its tokens again.
        num_told = self._num_told.get(index, 0)
        positions = (output.logprobs or ())[max(0, num_told - output.start) :]
        self._num_told[index] = num_told + len(positions)
        return positions

    def _end(self, job: int, ended: Ended) -> list[bytes]:
        if not isinstance(ended.event, Finished):
            raise of_end(ended.event)
        self._tell(job)
        self._texts[job].finish()
        self._usages.append(ended.event.usage)
        for choice in ended.event.choices:
            index = self.reply.index(job, choice.choice)
            self._entry.append(self.reply.chunk(index, (), choice.finish_reason))
        if self.reply.include_usage and len(self._usages) == len(self.reply.job_ids):
            self._entry.append(self.reply.usage_chunk(total(self._usages)))
        return self._flush(ended)

    def _flush(self, item: Output | Ended) -> list[bytes]:
        # Ids of several jobs would be of no use to anybody; nor one whose entry is held.
        is_known = len(self.reply.job_ids) == 1 and not self._held
        if not self._entry:
            return []
        *first, last = self._entry
        self._entry = []
        return [*map(sse.event, first), sse.event(last, entry_id=item.id if is_known else None)]
