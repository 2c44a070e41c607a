"""OpenAI's `echo`: a completion that begins with its prompt, and the prompt's logprobs with it."""

from typing import Any, NamedTuple

from headwater.schemas import GenerationJob, PositionLogprobs

from ..tokenization import Tokenizer
from .logprobs import completion_logprobs


class Echo(NamedTuple):
    """A prompt as its completions begin with it."""

    text: str
    first: str
    """The text of its first token, which has no logprob."""

    @property
    def first_length(self) -> int:
        """Characters of *text* that are the first token's."""
        # A token that the tokenizer put first is no part of the text.
        return len(self.first) if self.text.startswith(self.first) else 0


def echoes(prompt: Any, jobs: list[GenerationJob], tokenizer: Tokenizer) -> list[Echo]:
    """Return what is echoed for each job: the *prompt* as it came, token ids as their text."""
    texts = prompt if isinstance(prompt, list) and isinstance(prompt[0], str) else [prompt]
    is_text = isinstance(texts[0], str)
    return [
        Echo(
            texts[number] if is_text else tokenizer.decode(job.prompt_token_ids),
            tokenizer.decode(job.prompt_token_ids[:1]),
        )
        for number, job in enumerate(jobs)
    ]


def with_echo(
    choice: dict[str, Any], echo: Echo, prompt: tuple[PositionLogprobs, ...] | None
) -> dict[str, Any]:
    """Return a completion's *choice* that begins with its prompt.

    *prompt* are the logprobs of its tokens but the first, told where the choice tells its own.
    """
    text = echo.text + choice["text"]
    own = choice["logprobs"]
    if own is None:
        return {**choice, "text": text}
    told = completion_logprobs(prompt or (), echo.first_length)
    first = first_logprobs(echo)
    shifted: dict[str, list[Any]] = {
        **own,
        "text_offset": [len(echo.text) + each for each in own["text_offset"]],
    }
    logprobs = {name: [*first[name], *told[name], *shifted[name]] for name in first}
    return {**choice, "text": text, "logprobs": logprobs}


def first_logprobs(echo: Echo) -> dict[str, list[Any]]:
    """Return the `logprobs` of the prompt's first token, which has none."""
    return {
        "tokens": [echo.first],
        "token_logprobs": [None],
        "top_logprobs": [None],
        "text_offset": [0],
    }
