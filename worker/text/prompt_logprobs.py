"""PromptLog: the logprobs of a job's prompt on their way into deltas."""

from collections.abc import Iterable

from headwater.schemas import DeltaPart, PositionLogprobs, PromptPart

from ..sequence import PromptReading
from .logprobs import position_logprobs
from .vocabulary import Vocabulary


class PromptLog:
    """Gives each position of the prompt to one delta, in order, whatever is read twice."""

    def __init__(self, vocabulary: Vocabulary, prompt_token_ids: tuple[int, ...]) -> None:
        self._vocabulary = vocabulary
        self._prompt = prompt_token_ids
        self._pending: list[PositionLogprobs] = []
        self._num_taken = 0

    @property
    def num_read(self) -> int:
        """Positions known so far: the next one to read."""
        return self._num_taken + len(self._pending)

    def resume(self, published: Iterable[DeltaPart]) -> None:
        """Leave out what earlier attempts have told."""
        self._num_taken = max((p.prompt.end - 1 for p in published if p.prompt), default=0)

    def push(self, reading: PromptReading) -> None:
        """Take what was read; a row that was taken away is read again, from where it begins."""
        for place, logprobs in enumerate(reading.logprobs, reading.first_position):
            if place == self.num_read:
                token_id = self._prompt[place + 1]
                self._pending.append(position_logprobs(self._vocabulary, token_id, logprobs))

    def take(self) -> PromptPart | None:
        """Return what came since the last call; None if nothing."""
        if not self._pending:
            return None
        taken, self._pending = self._pending, []
        start = self._num_taken + 1
        self._num_taken += len(taken)
        # Our own values: validating them again would cost more than making them.
        return PromptPart.model_construct(start=start, logprobs=tuple(taken))
