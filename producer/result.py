"""GenerationResult: a whole job, put together from its items."""

from collections import defaultdict
from collections.abc import Iterable
from typing import NamedTuple

from headwater.schemas import (
    Channel,
    ChoiceEnd,
    End,
    Finished,
    FinishReason,
    PositionLogprobs,
    TextSpan,
    ToolCall,
)

from .stream_reader import Ended, Output, Restart, TailItem


class ChoiceResult(NamedTuple):
    """One choice's output."""

    token_ids: tuple[int, ...]
    text: str
    """The content."""
    finish_reason: FinishReason | None
    """None where the job did not finish."""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    """In their order; the end's incomplete_tool_calls names those that were cut short."""
    logprobs: tuple[PositionLogprobs, ...] | None = None
    """One for each token, if the job asks for them."""


class GenerationResult(NamedTuple):
    """A job's output and how it ended: look at *end* first."""

    end: End
    choices: dict[int, ChoiceResult]
    """By number; empty for a job that ended before its first token."""
    prompt_logprobs: tuple[PositionLogprobs, ...] | None = None
    """One for each prompt token but the first, if the job asks for them."""


class ResultCollector:
    """Puts items together, for a caller that gets them one by one."""

    def __init__(self) -> None:
        self._token_ids: defaultdict[int, list[int]] = defaultdict(list)
        self._texts: defaultdict[int, _ChoiceText] = defaultdict(_ChoiceText)
        self._logprobs: defaultdict[int, list[PositionLogprobs]] = defaultdict(list)
        self._prompt: list[PositionLogprobs] = []
        self._end: End | None = None

    def feed(self, item: TailItem) -> None:
        """Take the next item."""
        if isinstance(item, Restart):
            self._token_ids.clear()
            self._texts.clear()
            self._logprobs.clear()
            self._prompt.clear()
        elif isinstance(item, Output):
            self._token_ids[item.choice].extend(item.token_ids)
            self._logprobs[item.choice].extend(item.logprobs or ())
            self._prompt.extend(item.prompt.logprobs if item.prompt else ())
            for span in item.text:
                self._texts[item.choice].add(span)
        elif isinstance(item, Ended):
            self._end = item.event

    def result(self) -> GenerationResult:
        """Return what the items came to; raises ValueError before the end was fed."""
        if self._end is None:
            raise ValueError("the items have no end yet")
        ended = self._end.choices if isinstance(self._end, Finished) else ()
        ends = {each.choice: each for each in ended}
        choices = {
            choice: self._choice(choice, ends.get(choice))
            for choice in sorted(self._token_ids.keys() | ends.keys())
        }
        return GenerationResult(self._end, choices, tuple(self._prompt) or None)

    def _choice(self, choice: int, end: ChoiceEnd | None) -> ChoiceResult:
        token_ids = tuple(self._token_ids[choice])
        logprobs = tuple(self._logprobs[choice]) or None
        reason = end.finish_reason if end is not None else None
        if end is not None and end.text is not None:
            # A job with stream="final" has its text in the end.
            return ChoiceResult(
                token_ids, end.text, reason, end.reasoning or "", end.tool_calls, logprobs
            )
        text = self._texts[choice]
        return ChoiceResult(
            token_ids, text.content, reason, text.reasoning, text.tool_calls(), logprobs
        )


class _ChoiceText:
    """The text of one choice so far, by channel."""

    def __init__(self) -> None:
        self.content = ""
        self.reasoning = ""
        self._calls: list[tuple[TextSpan, list[str]]] = []
        """The span that began each call, and the pieces of its arguments."""

    def add(self, span: TextSpan) -> None:
        if span.channel is Channel.CONTENT:
            self.content += span.text
        elif span.channel is Channel.REASONING:
            self.reasoning += span.text
        else:
            if not self._calls or self._calls[-1][0].index != span.index:
                self._calls.append((span, []))
            self._calls[-1][1].append(span.text)

    def tool_calls(self) -> tuple[ToolCall, ...]:
        return tuple(
            ToolCall(
                index=head.index or 0,
                name=head.name or "",
                arguments="".join(pieces),
                call_id=head.call_id,
            )
            for head, pieces in self._calls
        )


def collect(items: Iterable[TailItem]) -> GenerationResult:
    """Read *items* to the end; a tail that ends otherwise raises before."""
    collector = ResultCollector()
    for item in items:
        collector.feed(item)
    return collector.result()
