"""TextLog: the certain text of one choice, by channel, and how much of it is in deltas."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TypeAlias

from headwater.schemas import Channel, HeadwaterError, TextSpan, ToolCall

from .segment import CallHead, Segment

_Key: TypeAlias = tuple[Channel, int | None]


class TextDiverged(HeadwaterError):
    """Published tokens do not give the published text any more: the job has to start again."""


@dataclass(slots=True)
class _Run:
    """Adjacent text of one channel, of one call in it."""

    channel: Channel
    call: CallHead | None
    pieces: list[str] = field(default_factory=list)

    @property
    def key(self) -> _Key:
        return self.channel, self.call.number if self.call is not None else None

    @property
    def text(self) -> str:
        return "".join(self.pieces)


class TextLog:
    """Places segments in their channels; gives each character to one delta, or keeps all."""

    def __init__(self, *, keeps_all: bool) -> None:
        self._keeps_all = keeps_all
        self._runs: list[_Run] = []
        self._num_taken: dict[_Key, int] = {}

    @property
    def content(self) -> str:
        """All content, where all is kept."""
        return self._text_of(Channel.CONTENT)

    @property
    def reasoning(self) -> str:
        """All reasoning, where all is kept."""
        return self._text_of(Channel.REASONING)

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        """All tool calls, where all is kept."""
        return tuple(
            ToolCall(
                index=run.call.number,
                name=run.call.name,
                arguments=run.text,
                call_id=run.call.call_id,
            )
            for run in self._runs
            if run.call is not None
        )

    def add_content(self, text: str) -> None:
        """Take content."""
        if text:
            self._run(Channel.CONTENT, None).pieces.append(text)

    def add(self, segments: Iterable[Segment]) -> None:
        """Take segments in their order."""
        for segment in segments:
            if segment.text:
                channel = Channel.REASONING if segment.is_reasoning else Channel.CONTENT
                if segment.call is not None:
                    channel = Channel.TOOL_CALL
                self._run(channel, segment.call).pieces.append(segment.text)

    def take(self) -> tuple[TextSpan, ...]:
        """Return what came since the last call; nothing where all is kept."""
        if self._keeps_all or not self._runs:
            return ()
        runs, self._runs = self._runs, []
        return tuple(self._span(run) for run in runs)

    def skip(self, published: Iterable[TextSpan]) -> None:
        """Leave out text that is out already; raises TextDiverged if it differs."""
        told = _Told()
        for span in published:
            told.add(span)
        # A run that is split by other channels' text goes on in a later one.
        rebuilt: dict[_Key, str] = {}
        for run in self._runs:
            rebuilt[run.key] = rebuilt.get(run.key, "") + run.text
            told.check_name(run)
        for key, text in told.texts.items():
            _check_start(key, rebuilt.get(key, ""), text)
        if not self._keeps_all:
            self._num_taken = {key: len(text) for key, text in told.texts.items()}
            self._drop(dict(self._num_taken))

    def _drop(self, num_left: dict[_Key, int]) -> None:
        """Cut as many characters as *num_left* says from the start of each channel."""
        for run in self._runs:
            cut = min(len(run.text), num_left.get(run.key, 0))
            num_left[run.key] = num_left.get(run.key, 0) - cut
            run.pieces = [run.text[cut:]]
        self._runs = [run for run in self._runs if run.text]

    def _run(self, channel: Channel, call: CallHead | None) -> _Run:
        if not self._runs or (self._runs[-1].channel, self._runs[-1].call) != (channel, call):
            self._runs.append(_Run(channel, call))
        return self._runs[-1]

    def _span(self, run: _Run) -> TextSpan:
        text = run.text
        start = self._num_taken.get(run.key, 0)
        self._num_taken[run.key] = start + len(text)
        call = run.call
        if call is None:
            return TextSpan(channel=run.channel, text_start=start, text=text)
        return TextSpan(
            channel=run.channel,
            text_start=start,
            text=text,
            index=call.number,
            name=None if start else call.name,
            call_id=None if start else call.call_id,
        )

    def _text_of(self, channel: Channel) -> str:
        return "".join(run.text for run in self._runs if run.channel is channel)


class _Told:
    """Text that is out already, put together from its spans."""

    def __init__(self) -> None:
        self.texts: dict[_Key, str] = {}
        self._names: dict[_Key, tuple[str | None, str | None]] = {}

    def add(self, span: TextSpan) -> None:
        """Take the next span; raises TextDiverged where it leaves a hole or overlaps."""
        key = (span.channel, span.index)
        known = self.texts.get(key, "")
        if span.text_start != len(known):
            raise TextDiverged(f"character {span.text_start} follows {len(known)}")
        if not known:
            self._names[key] = (span.name, span.call_id)
        self.texts[key] = known + span.text

    def check_name(self, run: _Run) -> None:
        """Raise TextDiverged where a published call has another name than the rebuilt one."""
        names = self._names.get(run.key)
        if run.call is not None and names not in (None, (run.call.name, run.call.call_id)):
            raise TextDiverged(f"tool call {run.call.number} was {names}, is {run.call.name!r} now")


def _check_start(key: _Key, rebuilt: str, published: str) -> None:
    if not rebuilt.startswith(published):
        pairs = enumerate(zip(rebuilt, published, strict=False))
        shorter = min(len(rebuilt), len(published))
        position = next((i for i, (a, b) in pairs if a != b), shorter)
        raise TextDiverged(f"rebuilt {key[0]} differs at character {position}")
