"""SequenceText: a choice's token ids in, its certain text and its end out."""

from collections.abc import Collection, Iterable
from typing import NamedTuple, Self

from headwater.schemas import (
    DeltaPart,
    FinishReason,
    GenerationJob,
    HeadwaterError,
    StreamMode,
    TextSpan,
)

from .detokenizer import start_detokenizer
from .stops import StopMatcher
from .vocabulary import Vocabulary


class TextDiverged(HeadwaterError):
    """Published tokens do not give the published text any more: the job has to start again."""


class Stop(NamedTuple):
    """Why a choice ended."""

    finish_reason: FinishReason
    matched_stop: str | int | None = None
    """The stop string or stop token id; None for end-of-sequence and length."""


class SequenceText:
    """The text of one choice: detokenizer, stop strings, and what is not yet in a delta.

    Every sampled token counts and is listed in a delta, the one that ends the choice too; the
    text leaves out an end-of-sequence or stop token and, without include_stop_str, a stop string.
    What ends a choice, in
    this order, for the output token of index i (from 0):

    - an end-of-sequence id, unless ignore_eos; then an id of stop_token_ids; both if
      i >= min_tokens. Before that they are ordinary tokens (a special one has no text);
    - a stop string whose last character comes with token i >= min_tokens. It is cut as a whole,
      also where it began before min_tokens; one that ended before is ordinary text;
    - max_tokens reached.

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
        choice: int = 0,
    ) -> None:
        """Start with no output; *eos_token_ids* are the model's."""
        self._job = job
        self._choice = choice
        self._detokenizer = start_detokenizer(vocabulary, job.prompt_token_ids)
        self._stops = StopMatcher(job.stop) if job.stop else None
        self._eos_token_ids = frozenset(() if job.ignore_eos else eos_token_ids)
        self._end_token_ids = self._eos_token_ids.union(job.stop_token_ids)
        self._num_tokens = 0
        self._pending_token_ids: list[int] = []
        self._content = _Channel(keeps_all=job.stream is StreamMode.FINAL)
        self._stop: Stop | None = None

    @classmethod
    def resume(
        cls,
        vocabulary: Vocabulary,
        job: GenerationJob,
        published: Iterable[DeltaPart],
        *,
        eos_token_ids: Collection[int] = (),
        choice: int = 0,
    ) -> Self:
        """Rebuild the state after the *published* parts (those of other choices are skipped).

        Nothing that is out already comes again from take(). Where the published tokens end the
        choice, `stop` is set. Raises TextDiverged when the text rebuilt from the published
        tokens does not start with the published text.
        """
        text = cls(vocabulary, job, eos_token_ids=eos_token_ids, choice=choice)
        parts = [part for part in published if part.choice == choice]
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
    def whole_text(self) -> str:
        """All certain text so far, for a job with stream="final"."""
        return self._content.whole_text

    def push(self, token_id: int) -> Stop | None:
        """Take the next output token; returns why the choice ends with it, if it does."""
        index = self._num_tokens
        self._num_tokens = index + 1
        self._pending_token_ids.append(token_id)
        may_stop = index >= self._job.min_tokens
        if may_stop and token_id in self._end_token_ids:
            return self._end(self._token_stop(token_id))
        matched = self._add(self._detokenizer.push(token_id), may_match=may_stop)
        if matched is not None:
            self._stop = Stop(FinishReason.STOP, matched)
        elif self._num_tokens >= self._job.max_tokens:
            return self._end(Stop(FinishReason.LENGTH))
        return self._stop

    def finish(self) -> None:
        """End the choice for a reason of the caller's: the held text goes out."""
        if self._stop is None:
            self._flush()

    def take(self) -> DeltaPart | None:
        """Return every token and all certain text since the last call; None if nothing is new.

        A job with stream="final" gets its tokens without text.
        """
        text = self._content.take()
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
        self._stop = stop if matched is None else Stop(FinishReason.STOP, matched)
        return self._stop

    def _flush(self) -> str | None:
        may_match = self._num_tokens > self._job.min_tokens
        matched = self._add(self._detokenizer.flush(), may_match=may_match)
        if self._stops is not None:
            self._content.add(self._stops.flush())
        return matched

    def _add(self, text: str, *, may_match: bool) -> str | None:
        """Pass *text* on; returns the stop string that cut it."""
        if self._stops is None:
            self._content.add(text)
            return None
        output = self._stops.push(text, may_match=may_match)
        self._content.add(output.text)
        if output.matched is not None and self._job.include_stop_str:
            self._content.add(output.matched)
        return output.matched

    def _replay(self, parts: list[DeltaPart]) -> None:
        published = _Published()
        for part in parts:
            if part.start != self._num_tokens:
                raise TextDiverged(f"token {part.start} follows token {self._num_tokens}")
            for token_id in part.token_ids:
                if self._stop is not None:
                    raise TextDiverged(f"tokens go on after the end at {self._num_tokens}")
                self.push(token_id)
            published.add(part)
        self._pending_token_ids = []
        self._content.skip("".join(published.pieces))


class _Published:
    """Text that is out already, put together from its parts."""

    def __init__(self) -> None:
        self.pieces: list[str] = []
        self._num_chars = 0

    def add(self, part: DeltaPart) -> None:
        """Take the next part; raises TextDiverged where it leaves a hole or overlaps."""
        for span in part.text:
            if span.text_start != self._num_chars:
                raise TextDiverged(f"character {span.text_start} follows {self._num_chars}")
            self.pieces.append(span.text)
            self._num_chars += len(span.text)


class _Channel:
    """Text of one channel that is not yet in a delta, and how much is."""

    __slots__ = ("_keeps_all", "_num_taken", "_pieces")

    def __init__(self, *, keeps_all: bool) -> None:
        self._keeps_all = keeps_all
        self._pieces: list[str] = []
        self._num_taken = 0

    @property
    def whole_text(self) -> str:
        return "".join(self._pieces)

    def add(self, text: str) -> None:
        if text:
            self._pieces.append(text)

    def take(self) -> tuple[TextSpan, ...]:
        if self._keeps_all or not self._pieces:
            return ()
        text = "".join(self._pieces)
        start, self._num_taken = self._num_taken, self._num_taken + len(text)
        self._pieces = []
        return (TextSpan(text_start=start, text=text),)

    def skip(self, published: str) -> None:
        """Leave out text that is out already; raises TextDiverged if it differs."""
        rebuilt = "".join(self._pieces)
        if not rebuilt.startswith(published):
            position = _first_difference(rebuilt, published)
            raise TextDiverged(f"rebuilt text differs at character {position}")
        if not self._keeps_all:
            rest = rebuilt[len(published) :]
            self._pieces = [rest] if rest else []
            self._num_taken = len(published)


def _first_difference(first: str, second: str) -> int:
    pairs = enumerate(zip(first, second, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(first), len(second)))
