"""PartLog: parts of deltas that wait for their entry, or that were told, held small."""

from array import array
from collections import deque
from collections.abc import Iterable, Iterator
from io import StringIO

from headwater.schemas import DeltaPart, PositionLogprobs, PromptPart, TextSpan

_TOKEN_BYTES = 8
"""What a token id takes here; in an entry about as much."""
_MAX_PROMPT_BYTES = 256 * 1024
"""Of prompt logprobs in one entry: those of a whole prompt would be many megabytes."""


class PartLog:
    """Parts of several choices, merged into one part for each.

    Held as arrays and buffers: a part for each token would take a hundred times the memory.
    """

    def __init__(self, parts: Iterable[DeltaPart] = ()) -> None:
        self._choices: dict[int, _ChoiceLog] = {}
        self._prompt = _PromptLog()
        self.nbytes = 0
        self.add(parts)

    def __bool__(self) -> bool:
        return bool(self._choices) or bool(self._prompt.positions)

    def add(self, parts: Iterable[DeltaPart]) -> None:
        """Take parts that follow on those before."""
        for part in parts:
            if part.prompt is not None:
                self.nbytes += self._prompt.add(part.prompt)
                if not part.token_ids and not part.text:
                    continue
            log = self._choices.get(part.choice)
            if log is None:
                log = self._choices[part.choice] = _ChoiceLog(part.start)
            self.nbytes += log.add(part)

    def clear(self) -> None:
        """Forget all."""
        self._choices.clear()
        self._prompt = _PromptLog()
        self.nbytes = 0

    def merged(self) -> tuple[DeltaPart, ...]:
        """Return one part a choice that holds all that was added, the prompt's before them."""
        return (*self._prompt.parts(), *self._told())

    def take(self) -> tuple[DeltaPart, ...]:
        """Take out what makes the next entry: of a long prompt it is a piece, of all else all."""
        prompt, num_bytes = self._prompt.take()
        if self._prompt.positions:
            self.nbytes -= num_bytes
            return tuple(prompt)
        parts = (*prompt, *self._told())
        self.clear()
        return parts

    def _told(self) -> tuple[DeltaPart, ...]:
        return tuple(log.part(choice) for choice, log in self._choices.items())


class _PromptLog:
    """Logprobs of prompt tokens, from one on."""

    def __init__(self) -> None:
        self.start = 1
        self.positions: deque[bytes] = deque()
        """Encoded: as models they would take ten times the memory."""

    def add(self, part: PromptPart) -> int:
        """Take the next part and return about how many bytes it takes."""
        if not self.positions:
            self.start = part.start
        new = [each.encode() for each in part.logprobs]
        self.positions += new
        return sum(map(len, new))

    def parts(self) -> Iterator[DeltaPart]:
        """Yield all of it, as one part."""
        if self.positions:
            yield _prompt_part(self.start, self.positions)

    def take(self) -> tuple[list[DeltaPart], int]:
        """Take out what fits into an entry, and say about how many bytes it is."""
        taken: list[bytes] = []
        num_bytes, start = 0, self.start
        while self.positions and num_bytes < _MAX_PROMPT_BYTES:
            taken.append(self.positions.popleft())
            num_bytes += len(taken[-1])
        self.start += len(taken)
        return ([_prompt_part(start, taken)] if taken else []), num_bytes


def _prompt_part(start: int, positions: Iterable[bytes]) -> DeltaPart:
    logprobs = tuple(map(PositionLogprobs.decode, positions))
    # Our own values: validating them again would cost more than making them.
    prompt = PromptPart.model_construct(start=start, logprobs=logprobs)
    return DeltaPart.model_construct(
        choice=0, start=0, token_ids=(), text=(), logprobs=None, prompt=prompt
    )


class _ChoiceLog:
    """What one choice gained, from token *start* on."""

    __slots__ = ("_logprobs", "_spans", "_start", "_token_ids")

    def __init__(self, start: int) -> None:
        self._start = start
        self._token_ids = array("q")
        self._logprobs: list[bytes] = []
        """Encoded: as models they would take ten times the memory."""
        self._spans: list[tuple[TextSpan, StringIO]] = []
        """Runs of one channel's text, each with the span that began it, in their order."""

    def add(self, part: DeltaPart) -> int:
        """Take the next part and return about how many bytes it takes."""
        self._token_ids.extend(part.token_ids)
        for span in part.text:
            if not self._spans or not self._spans[-1][0].is_continued_by(span):
                self._spans.append((span, StringIO()))
            self._spans[-1][1].write(span.text)
        logprobs = [each.encode() for each in part.logprobs or ()]
        self._logprobs += logprobs
        num_text = sum(len(span.text) for span in part.text)
        return _TOKEN_BYTES * len(part.token_ids) + num_text + sum(map(len, logprobs))

    def part(self, choice: int) -> DeltaPart:
        """Return all of it as one part."""
        # Our own values: validating them again would cost more than making them.
        return DeltaPart.model_construct(
            choice=choice,
            start=self._start,
            token_ids=tuple(self._token_ids),
            text=tuple(
                head.model_copy(update={"text": text.getvalue()}) for head, text in self._spans
            ),
            logprobs=tuple(map(PositionLogprobs.decode, self._logprobs)) or None,
            prompt=None,
        )
