"""Checking what a job has its output look like, before it is submitted."""

import random
import time
from functools import lru_cache
from typing import Final

from headwater.schemas import GenerationJob
from headwater.schemas.grammar import GrammarError, check, start_matcher
from headwater.schemas.reply_grammar import TEXT_CALLS, reply_grammar
from llguidance import LLMatcher, LLTokenizer

from .errors import InvalidRequest

_NUM_KEPT: Final = 256
"""Jobs of one application share their formats; each is tried out once."""
_NUM_TRIED_BYTES: Final = 64
_TRIAL_S: Final = 0.25


def check_grammar(job: GenerationJob) -> None:
    """Compile what *job* has its output look like and write a little; raises InvalidRequest."""
    try:
        # Reasoning before it needs no check: it is free.
        grammar = reply_grammar(job, TEXT_CALLS)
        reason = _fault(grammar) if grammar is not None else None
    except (GrammarError, ValueError) as error:
        reason = str(error)
    if reason is not None:
        asked = job.response_format
        what = "tool_choice" if asked is None else f"response_format ({asked.type})"
        raise InvalidRequest(f"{what} can't be enforced: {reason}")


@lru_cache(maxsize=_NUM_KEPT)
def _fault(grammar: str) -> str | None:
    """Return what is wrong with *grammar*, if anything."""
    try:
        # A vocabulary of single bytes: the model's own need not be known here.
        _try_out(start_matcher(grammar, LLTokenizer("byte")))
    except GrammarError as error:
        return str(error)
    return None


def _try_out(matcher: LLMatcher) -> None:
    """Follow the grammar for some bytes: some faults only show on the way."""
    draw = random.Random(0)  # noqa: S311 - the same trial every time, no secret
    until = time.monotonic() + _TRIAL_S
    for _ in range(_NUM_TRIED_BYTES):
        mask = matcher.compute_bitmask()
        check(matcher)
        if matcher.is_stopped() or time.monotonic() > until:
            return
        allowed = [token for token in range(256) if mask[token >> 3] >> (token & 7) & 1]
        if not allowed:
            return
        matcher.consume_token(draw.choice(allowed))
        check(matcher)
