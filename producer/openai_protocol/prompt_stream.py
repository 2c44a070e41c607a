"""PromptStream: what a streamed reply tells of one job's prompt, in the pieces that it comes in."""

from typing import Any, NamedTuple

from headwater.schemas import GenerationJob, PositionLogprobs, PromptPart

from .echo import Echo, first_logprobs
from .logprobs import completion_logprobs, prompt_logprobs


class PromptPiece(NamedTuple):
    """A part of the prompt, as a chunk tells it."""

    text: str = ""
    """Of the echo; all pieces together are its text."""
    logprobs: dict[str, Any] | None = None
    """Of the echo's tokens, where the completion tells its own."""
    prompt_logprobs: list[dict[str, Any] | None] | None = None
    """As vLLM's server has them in whole replies, where they are asked for."""


class PromptStream:
    """Follows the prompt's logprobs; gives each position to one piece, whatever is told twice."""

    def __init__(self, job: GenerationJob, echo: Echo | None, *, tells_prompt: bool) -> None:
        """Without *echo* only *tells_prompt*, vLLM's field, is served."""
        self._echo = echo
        self._tells_prompt = tells_prompt
        self._tells_echo = echo is not None and job.logprobs is not None
        self._num_tokens = len(job.prompt_token_ids)
        self._num_told = 1
        self._offset = 0 if echo is None else echo.first_length

    @property
    def is_echoed(self) -> bool:
        """Whether the echo is out, so that the choices' own text may follow."""
        return not self._tells_echo or self._num_told >= self._num_tokens

    @property
    def num_chars(self) -> int:
        """Characters of the echo: where the choices' own text begins."""
        return 0 if self._echo is None else len(self._echo.text)

    def first(self) -> PromptPiece:
        """Return the piece that needs no model: text, and the first token without a logprob."""
        told: list[dict[str, Any] | None] | None = [None] if self._tells_prompt else None
        if self._echo is None or not self._tells_echo:
            return PromptPiece(self._text(0), None, told)
        return PromptPiece(self._text(0), first_logprobs(self._echo), told)

    def take(self, part: PromptPart) -> PromptPiece | None:
        """Return the piece that *part* makes; None where it tells nothing that was asked for."""
        positions = part.logprobs[max(0, self._num_told - part.start) :]
        if not positions:
            return None
        self._num_told += len(positions)
        told = prompt_logprobs(positions)[1:] if self._tells_prompt else None
        if not self._tells_echo:
            return None if told is None else PromptPiece("", None, told)
        return self._echo_piece(positions, told)

    def _echo_piece(
        self, positions: tuple[PositionLogprobs, ...], told: list[dict[str, Any] | None] | None
    ) -> PromptPiece:
        start = self._offset
        self._offset += sum(len(position.text) for position in positions)
        return PromptPiece(self._text(start), completion_logprobs(positions, start), told)

    def _text(self, start: int) -> str:
        """Return the echo's text from *start* up to where the tokens are told; at last all."""
        if self._echo is None:
            return ""
        return self._echo.text[start:] if self.is_echoed else self._echo.text[start : self._offset]
