"""SequenceText: a choice's token ids in, its certain text and its end out."""

from collections.abc import Collection, Iterable
from typing import NamedTuple, Self

from headwater.schemas import DeltaPart, FinishReason, GenerationJob, StreamMode, TextSpan, ToolCall

from ..channel_family import ChannelFamily, Mode
from .channels import ChannelSplitter
from .detokenizer import start_detokenizer
from .leading_reasoning import LeadingReasoning
from .reply_shape import reply_shape
from .start_mode import marker_token_ids, start_mode
from .stops import StopMatcher
from .text_log import TextDiverged, TextLog
from .vocabulary import Vocabulary


class Stop(NamedTuple):
    """Why a choice ended."""

    finish_reason: FinishReason
    matched_stop: str | int | None = None
    """The stop string or stop token id; None for end-of-sequence and length."""


class SequenceText:
    """The text of one choice: detokenizer, stop strings, channels, and what is in no delta yet.

    Every sampled token counts and is listed in a delta, the one that ends the choice too; the
    text leaves out an end-of-sequence or stop token and, without include_stop_str, a stop string.
    What ends a choice, in
    this order, for the output token of index i (from 0):

    - an end-of-sequence id, unless ignore_eos; then an id of stop_token_ids; both if
      i >= min_tokens. Before that they are ordinary tokens (a special one has no text);
    - a stop string whose last character comes with token i >= min_tokens. It is cut as a whole,
      also where it began before min_tokens; one that ended before is ordinary text;
    - for a job that may call one tool only, the end of the first call. What the token holds
      behind it is cut, a stop string too;
    - max_tokens reached.

    With a *family* the text is split into channels behind the stop strings, which see the markers
    too: a special token that is part of a marker, or stands in a tool call, has its text there.
    A choice that stops after at least one whole tool call ends as TOOL_CALLS.

    However the choice ends, the text still held goes out: push() does it for its own ends,
    finish() for all others (cancelled, failed). A choice that goes on elsewhere (preempted,
    handed back) has not ended and keeps its held text held.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        job: GenerationJob,
        *,
        eos_token_ids: Collection[int] = (),
        family: ChannelFamily | None = None,
        choice: int = 0,
    ) -> None:
        """Start with no output; *eos_token_ids* and *family* are the model's."""
        self._job = job
        self._choice = choice
        self._detokenizer = start_detokenizer(vocabulary, job.prompt_token_ids)
        self._stops = StopMatcher(job.stop) if job.stop else None
        self._eos_token_ids = frozenset(() if job.ignore_eos else eos_token_ids)
        self._end_token_ids = self._eos_token_ids.union(job.stop_token_ids)
        self._num_tokens = 0
        self._pending_token_ids: list[int] = []
        self._log = TextLog(keeps_all=job.stream is StreamMode.FINAL)
        self._splitter: ChannelSplitter | LeadingReasoning | None = None
        if family is not None and job.split_channels:
            self._splitter = _splitter(vocabulary, family, job)
            self._special_texts = vocabulary.special_texts
            self._marker_ids = marker_token_ids(vocabulary, family)
        self._num_reasoning_tokens = 0
        self._stop: Stop | None = None

    @classmethod
    def resume(
        cls,
        vocabulary: Vocabulary,
        job: GenerationJob,
        published: Iterable[DeltaPart],
        *,
        eos_token_ids: Collection[int] = (),
        family: ChannelFamily | None = None,
        choice: int = 0,
    ) -> Self:
        """Rebuild the state after the *published* parts (those of other choices are skipped).

        Nothing that is out already comes again from take(). Where the published tokens end the
        choice, `stop` is set. Raises TextDiverged when the text rebuilt from the published
        tokens does not start with the published text.
        """
        text = cls(vocabulary, job, eos_token_ids=eos_token_ids, family=family, choice=choice)
        own = (part for part in published if part.choice == choice)
        # Others tell of the prompt only.
        parts = [part for part in own if part.token_ids or part.text]
        text._replay(parts)
        return text

    @property
    def num_tokens(self) -> int:
        """Output tokens so far."""
        return self._num_tokens

    @property
    def stop(self) -> Stop | None:
        """Why the choice ended; None while it goes on, or when finish() ended it."""
        return self._stop

    @property
    def num_reasoning_tokens(self) -> int:
        """Output tokens that belong to the reasoning, its markers not counted."""
        return self._num_reasoning_tokens

    @property
    def whole_text(self) -> str:
        """All certain content so far, for a job with stream="final"."""
        return self._log.content

    @property
    def whole_reasoning(self) -> str:
        """All certain reasoning so far, for such a job."""
        return self._log.reasoning

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        """All tool calls so far, for such a job."""
        return self._log.tool_calls

    @property
    def incomplete_tool_calls(self) -> tuple[int, ...]:
        """Indices of tool calls that were cut short or whose arguments are no JSON object."""
        return self._splitter.incomplete_calls if self._splitter is not None else ()

    def push(self, token_id: int) -> Stop | None:
        """Take the next output token; returns why the choice ends with it, if it does."""
        index = self._num_tokens
        self._num_tokens = index + 1
        self._pending_token_ids.append(token_id)
        may_stop = index >= self._job.min_tokens
        if may_stop and token_id in self._end_token_ids:
            return self._end(self._token_stop(token_id))
        was_reasoning = self._is_reasoning
        matched = self._add(self._text_of(token_id), may_match=may_stop)
        self._num_reasoning_tokens += was_reasoning and self._is_reasoning
        if matched is not None or self._has_called:
            return self._close(Stop(FinishReason.STOP, matched))
        if self._num_tokens >= self._job.max_tokens:
            return self._end(Stop(FinishReason.LENGTH))
        return self._stop

    def finish(self) -> None:
        """End the choice for a reason of the caller's: the held text goes out."""
        if self._stop is None:
            self._flush()
            self._flush_channels(is_complete=False)

    def take(self) -> DeltaPart | None:
        """Return every token and all certain text since the last call; None if nothing is new.

        A job with stream="final" gets its tokens without text.
        """
        text = self._log.take()
        if not (self._pending_token_ids or text):
            return None
        token_ids, self._pending_token_ids = tuple(self._pending_token_ids), []
        start = self._num_tokens - len(token_ids)
        return DeltaPart(choice=self._choice, start=start, token_ids=token_ids, text=text)

    def _token_stop(self, token_id: int) -> Stop:
        is_eos = token_id in self._eos_token_ids
        return Stop(FinishReason.STOP, None if is_eos else token_id)

    def _end(self, stop: Stop) -> Stop:
        """Let the held text out; a stop string that only shows up there wins."""
        matched = self._flush()
        return self._close(stop if matched is None else Stop(FinishReason.STOP, matched))

    def _close(self, stop: Stop) -> Stop:
        """Let out what the channels hold, and note why the choice ended."""
        is_complete = stop.finish_reason is FinishReason.STOP
        self._flush_channels(is_complete=is_complete and not isinstance(stop.matched_stop, str))
        if is_complete and self._splitter is not None and self._splitter.num_whole_calls:
            stop = Stop(FinishReason.TOOL_CALLS, stop.matched_stop)
        self._stop = stop
        return stop

    def _flush(self) -> str | None:
        may_match = self._num_tokens > self._job.min_tokens
        matched = self._add(self._detokenizer.flush(), may_match=may_match)
        if self._stops is not None:
            self._pass_on(self._stops.flush())
        return matched

    def _flush_channels(self, *, is_complete: bool) -> None:
        if self._splitter is not None:
            self._log.add(self._splitter.flush(is_complete=is_complete))

    def _add(self, text: str, *, may_match: bool) -> str | None:
        """Pass *text* on; returns the stop string that cut it."""
        if self._stops is None:
            self._pass_on(text)
            return None
        output = self._stops.push(text, may_match=may_match)
        self._pass_on(output.text)
        if self._has_called:
            return None
        if output.matched is not None and self._job.include_stop_str:
            self._pass_on(output.matched)
        return output.matched

    def _pass_on(self, text: str) -> None:
        if self._splitter is None:
            self._log.add_content(text)
        elif text:
            self._log.add(self._splitter.push(text))

    @property
    def _has_called(self) -> bool:
        """Whether the one call that the job allows has ended."""
        return isinstance(self._splitter, ChannelSplitter) and self._splitter.is_over

    @property
    def _is_reasoning(self) -> bool:
        return self._splitter is not None and self._splitter.mode is Mode.REASONING

    def _text_of(self, token_id: int) -> str:
        """Return the text that *token_id* makes certain."""
        if self._splitter is not None and token_id in self._special_texts:
            is_shown = self._splitter.mode is Mode.TOOL_CALLS or token_id in self._marker_ids
            if is_shown:
                # Whatever character was begun, this token does not go on with it.
                return self._detokenizer.flush() + self._special_texts[token_id]
        return self._detokenizer.push(token_id)

    def _replay(self, parts: list[DeltaPart]) -> None:
        spans: list[TextSpan] = []
        for part in parts:
            if part.start != self._num_tokens:
                raise TextDiverged(f"token {part.start} follows token {self._num_tokens}")
            for token_id in part.token_ids:
                if self._stop is not None:
                    raise TextDiverged(f"tokens go on after the end at {self._num_tokens}")
                self.push(token_id)
            spans += part.text
        self._pending_token_ids = []
        self._log.skip(spans)


def _splitter(
    vocabulary: Vocabulary, family: ChannelFamily, job: GenerationJob
) -> ChannelSplitter | LeadingReasoning | None:
    if job.tool_choice == "none":
        family = family.without_calls()
    mode = start_mode(vocabulary, family, job.prompt_token_ids)
    if not job.is_enforced:
        return ChannelSplitter(
            family, start=mode, tools=job.tools, ends_after_call=job.ends_after_call
        )
    # What keeps to a format is content, whatever words it holds.
    shape = reply_shape(vocabulary, family, job)
    calls = ChannelSplitter(family, tools=job.tools) if job.forced_tools else None
    return calls if shape.reasoning is None else LeadingReasoning(shape, calls)
