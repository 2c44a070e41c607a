"""Where the prompt has left the text: templates may open the reasoning for the model."""

from functools import lru_cache
from typing import Final

from ..channel_family import ChannelFamily, Mode
from .channels import ChannelSplitter
from .vocabulary import Vocabulary

_MAX_TOKENS: Final = 16_384
"""Of the prompt so many last tokens are looked at: reasoning that is to be continued."""


@lru_cache(maxsize=1)  # the choices of a job are opened one after the other
def start_mode(
    vocabulary: Vocabulary, family: ChannelFamily, prompt_token_ids: tuple[int, ...]
) -> Mode:
    """Return what the first output character is, unless it belongs to a marker.

    The markers in the model's own turn decide. That turn begins behind the last added token that
    is no part of a marker: what a user wrote before it does not count.
    """
    mode = _splitter(vocabulary, family, prompt_token_ids).mode
    # A call whose beginning the prompt holds can't be told: its end is content.
    return Mode.CONTENT if mode is Mode.TOOL_CALLS else mode


def has_reasoned(
    vocabulary: Vocabulary, family: ChannelFamily, prompt_token_ids: tuple[int, ...]
) -> bool:
    """Whether the model's own turn in the prompt holds reasoning that has ended, even if empty."""
    markers = family.reasoning_markers
    return markers is not None and markers.end in _turn(vocabulary, family, prompt_token_ids)


def _splitter(
    vocabulary: Vocabulary, family: ChannelFamily, prompt_token_ids: tuple[int, ...]
) -> ChannelSplitter:
    splitter = ChannelSplitter(family)
    splitter.push(_turn(vocabulary, family, prompt_token_ids))
    return splitter


@lru_cache(maxsize=1)
def _turn(vocabulary: Vocabulary, family: ChannelFamily, prompt_token_ids: tuple[int, ...]) -> str:
    start = len(prompt_token_ids)
    lowest = max(0, start - _MAX_TOKENS)
    ends = vocabulary.added_texts
    while start > lowest:
        text = ends.get(prompt_token_ids[start - 1])
        if text is not None and not _is_in_marker(text, family):
            break
        start -= 1
    return vocabulary.tokenizer.decode(prompt_token_ids[start:], skip_special_tokens=False)


@lru_cache(maxsize=8)
def marker_token_ids(vocabulary: Vocabulary, family: ChannelFamily) -> frozenset[int]:
    """Return the special tokens that markers are made of."""
    special = vocabulary.special_texts.items()
    return frozenset(token_id for token_id, text in special if _is_in_marker(text, family))


def _is_in_marker(text: str, family: ChannelFamily) -> bool:
    return any(text in marker for marker in family.markers)
