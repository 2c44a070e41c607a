"""GenerationResult: a whole job, put together from its items."""

from collections import defaultdict
from collections.abc import Iterable
from typing import NamedTuple

from headwater.schemas import Channel, End, Finished, FinishReason

from .stream_reader import Ended, Output, Restart, TailItem


class ChoiceResult(NamedTuple):
    """One choice's output."""

    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason | None
    """None where the job did not finish."""


class GenerationResult(NamedTuple):
    """A job's output and how it ended: look at *end* first."""

    end: End
    choices: dict[int, ChoiceResult]
    """By number; empty for a job that ended before its first token."""


class ResultCollector:
    """Puts items together, for a caller that gets them one by one."""

    def __init__(self) -> None:
        self._token_ids: defaultdict[int, list[int]] = defaultdict(list)
        self._text: defaultdict[int, str] = defaultdict(str)
        self._end: End | None = None

    def feed(self, item: TailItem) -> None:
        """Take the next item."""
        if isinstance(item, Restart):
            self._token_ids.clear()
            self._text.clear()
        elif isinstance(item, Output):
            self._token_ids[item.choice].extend(item.token_ids)
            self._text[item.choice] += "".join(
                span.text for span in item.text if span.channel is Channel.CONTENT
            )
        elif isinstance(item, Ended):
            self._end = item.event

    def result(self) -> GenerationResult:
        """Return what the items came to; raises ValueError before the end was fed."""
        if self._end is None:
            raise ValueError("the items have no end yet")
        ended = self._end.choices if isinstance(self._end, Finished) else ()
        ends = {each.choice: each for each in ended}
        choices = {}
        for choice in sorted(self._token_ids.keys() | ends.keys()):
            own_end = ends.get(choice)
            # A job with stream="final" has its text in the end.
            whole = own_end.text if own_end is not None else None
            choices[choice] = ChoiceResult(
                tuple(self._token_ids[choice]),
                self._text[choice] if whole is None else whole,
                own_end.finish_reason if own_end is not None else None,
            )
        return GenerationResult(self._end, choices)


def collect(items: Iterable[TailItem]) -> GenerationResult:
    """Read *items* to the end; a tail that ends otherwise raises before."""
    collector = ResultCollector()
    for item in items:
        collector.feed(item)
    return collector.result()
