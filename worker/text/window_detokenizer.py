"""WindowDetokenizer: for decoders whose text for a token depends on its neighbours."""

from collections.abc import Callable, Sequence

_REPLACEMENT = "\ufffd"
_NUM_PROMPT_TOKENS = 8
"""Tokens of the prompt that may change what the first output tokens look like."""
_MAX_HELD_TOKENS = 8
"""Text that stays undecided for longer is given out as it is."""
_MAX_WINDOW_TOKENS = 32
"""Of tokens that add no text so many are kept at most."""


class WindowDetokenizer:
    """Decodes a short window that opens on tokens whose text is out already.

    Only what a new token adds after that text is given. Slower than a table, and bounded: no
    call decodes more than the window.
    """

    def __init__(self, decode: Callable[[list[int]], str], prompt_token_ids: Sequence[int]) -> None:
        """Take the tokenizer's *decode*; of the prompt only the last few tokens are kept."""
        self._decode = decode
        self._window = list(prompt_token_ids[-_NUM_PROMPT_TOKENS:])
        self._num_shown_tokens = len(self._window)
        self._shown = decode(self._window)

    def push(self, token_id: int) -> str:
        """Return the text that is certain now and was not before."""
        self._window.append(token_id)
        num_held = len(self._window) - self._num_shown_tokens
        text = self._decode(self._window)
        if text.endswith(_REPLACEMENT) and num_held <= _MAX_HELD_TOKENS:
            return ""
        return self._show(text)

    def flush(self) -> str:
        """Return what is still held; the output has ended."""
        return self._show(self._decode(self._window))

    def _show(self, text: str) -> str:
        added = text[self._num_shown_chars(text) :]
        held = self._window[self._num_shown_tokens :]
        # Tokens without text (special ones) must not push the last visible one out.
        self._window = held if added else self._window[-_MAX_WINDOW_TOKENS:]
        self._num_shown_tokens = len(self._window)
        self._shown = self._decode(self._window)
        return added

    def _num_shown_chars(self, text: str) -> int:
        """Return where the new text starts in the window's *text*."""
        if text.startswith(self._shown):
            return len(self._shown)
        # The window began inside a character which *text* has completed.
        return len(self._shown.rstrip(_REPLACEMENT))
