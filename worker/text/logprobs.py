"""LogprobLog: the logprobs of a choice's tokens on their way into deltas, with token texts."""

import base64
import math
from collections.abc import Iterable

from headwater.schemas import DeltaPart, PositionLogprobs, TokenLogprob

from ..sequence import TokenLogprobs
from .vocabulary import Vocabulary


class LogprobLog:
    """What a choice's next delta has to tell of its tokens, one entry for each."""

    def __init__(self, vocabulary: Vocabulary, *, keeps_all: bool) -> None:
        """*keeps_all*: for the end event, too."""
        self._vocabulary = vocabulary
        self._keeps_all = keeps_all
        self._pending: list[PositionLogprobs] = []
        self._told: list[PositionLogprobs] = []

    @property
    def whole(self) -> tuple[PositionLogprobs, ...]:
        """Return all of the choice, if all are kept."""
        return (*self._told, *self._pending)

    def resume(self, published: Iterable[DeltaPart]) -> None:
        """Take what earlier attempts have told of this choice."""
        if self._keeps_all:
            self._told = [each for part in published for each in part.logprobs or ()]

    def push(self, token_id: int, logprobs: TokenLogprobs) -> None:
        """Take those of the next token."""
        self._pending.append(position_logprobs(self._vocabulary, token_id, logprobs))

    def take(self) -> tuple[PositionLogprobs, ...]:
        """Return those of the tokens since the last call."""
        taken, self._pending = self._pending, []
        if self._keeps_all:
            self._told += taken
        return tuple(taken)


def position_logprobs(
    vocabulary: Vocabulary, token_id: int, logprobs: TokenLogprobs
) -> PositionLogprobs:
    """Return what is told of one position, with the texts of its tokens."""
    top = zip(logprobs.top_ids, logprobs.top_logprobs, strict=True)
    chosen = _token_logprob(vocabulary, token_id, logprobs.logprob)
    # Our own values: validating them again would cost more than making them.
    return PositionLogprobs.model_construct(
        **chosen.__dict__, top=tuple(_token_logprob(vocabulary, *each) for each in top)
    )


def _token_logprob(vocabulary: Vocabulary, token_id: int, logprob: float) -> TokenLogprob:
    data = vocabulary.shown_bytes(token_id)
    text = data.decode(errors="replace")
    return TokenLogprob.model_construct(
        token_id=token_id,
        logprob=logprob if math.isfinite(logprob) else None,
        text=text,
        bytes=None if text.encode() == data else base64.b64encode(data).decode(),
    )
