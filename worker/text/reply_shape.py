"""Which markers surround the enforced part of a reply, for its grammar and its text alike."""

from typing import NamedTuple

from headwater.schemas import GenerationJob

from ..channel_family import ChannelFamily, MarkerPair, Mode
from .start_mode import has_reasoned, start_mode
from .vocabulary import Vocabulary


class ReplyShape(NamedTuple):
    """How a reply under a grammar is laid out."""

    reasoning: MarkerPair | None = None
    """None where the model may not reason before it."""
    is_reasoning: bool = False
    """Whether the prompt has begun the reasoning."""
    calls: MarkerPair | None = None
    """Around the calls that are enforced."""


def reply_shape(
    vocabulary: Vocabulary, family: ChannelFamily | None, job: GenerationJob
) -> ReplyShape:
    """Return the shape of *job*'s replies, which a grammar enforces.

    A model reasons once a turn: not behind reasoning that the prompt holds.
    """
    if family is None or not job.split_channels:
        return ReplyShape()
    calls = family.json_call_markers if job.forced_tools else None
    prompt = job.prompt_token_ids
    is_reasoning = start_mode(vocabulary, family, prompt) is Mode.REASONING
    may_reason = is_reasoning or not has_reasoned(vocabulary, family, prompt)
    return ReplyShape(family.reasoning_markers if may_reason else None, is_reasoning, calls)
