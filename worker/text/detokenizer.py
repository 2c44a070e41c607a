"""Detokenizers: output token ids to text, each with the same work per token at any length.

The reference text. Join the bytes of prompt and output and decode them as UTF-8, invalid bytes
replaced (one U+FFFD for each maximal subpart, as Python's and Rust's lossy decoding do). A
character, a U+FFFD counted as one, belongs to the output when at least one of its bytes does.
The output's characters are the reference text. So:

- a prompt that ends on a character: what decode(prompt + output) adds after decode(prompt);
- a prompt that ends inside a character which the output completes: the text begins with the
  whole character;
- a prompt that ends inside a character which the output does not continue: the U+FFFD for it is
  the prompt's, and the text begins with the output's own first character.

Rules for the start of a text (a stripped leading space) never apply: an output continues its
prompt, even one of special tokens only. Where a byte-fallback tokenizer's own decode() replaces
every byte of a run because one of them is invalid, only the invalid ones are replaced here.
"""

from codecs import utf_8_decode
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from .vocabulary import Piece, Vocabulary, to_bytes
from .window_detokenizer import WindowDetokenizer

_REPLACEMENT = "\ufffd"
_MAX_TAIL_BYTES = 3
"""An incomplete UTF-8 character has at most so many bytes."""


class Detokenizer(Protocol):
    """Text of one output, token by token."""

    def push(self, token_id: int) -> str:
        """Return the text that is certain now and was not before."""
        ...

    def flush(self) -> str:
        """Return what is still held; the output has ended."""
        ...


def start_detokenizer(vocabulary: Vocabulary, prompt_token_ids: Sequence[int]) -> Detokenizer:
    """Return a detokenizer for an output that continues *prompt_token_ids*."""
    if vocabulary.pieces is None:
        return WindowDetokenizer(vocabulary.decode, prompt_token_ids)
    return ByteDetokenizer(vocabulary.pieces, prompt_token_ids)


class ByteDetokenizer:
    """Decides on bytes; holds an incomplete UTF-8 tail and nothing else.

    Of the prompt it keeps the bytes of an unfinished last character at most, so prompt text
    can't reach the output.
    """

    __slots__ = ("_pieces", "_prompt_tail", "_tail")

    def __init__(self, pieces: tuple[Piece, ...], prompt_token_ids: Sequence[int] = ()) -> None:
        """Take the vocabulary's *pieces*; a prompt costs a look at its last tokens."""
        self._pieces = pieces
        self._tail = b""
        self._prompt_tail = _incomplete_tail(pieces, prompt_token_ids)

    @property
    def num_held_bytes(self) -> int:
        """Bytes of an incomplete character, which the next token may complete."""
        return len(self._tail)

    def push(self, token_id: int) -> str:
        """Return the text that is certain now and was not before."""
        try:
            piece = self._pieces[token_id]
        except IndexError:
            # The model's vocabulary is padded past the tokenizer's.
            return ""
        if self._tail or self._prompt_tail:
            return self._push_after_tail(to_bytes(piece))
        if isinstance(piece, str):
            return piece
        return self._decode(piece)

    def flush(self) -> str:
        """Return U+FFFD for a character of the output that was never completed."""
        text = _REPLACEMENT if self._tail else ""
        self._tail = self._prompt_tail = b""
        return text

    def _push_after_tail(self, data: bytes) -> str:
        if not data:
            return ""
        if self._prompt_tail:
            if _is_continued(self._prompt_tail, data):
                data = self._prompt_tail + data
            self._prompt_tail = b""
        return self._decode(self._tail + data)

    def _decode(self, data: bytes) -> str:
        text, self._tail = _split_tail(data)
        return text


class _Split(NamedTuple):
    """Text of whole characters, and the bytes of an incomplete one behind them."""

    text: str
    tail: bytes


def _split_tail(data: bytes) -> _Split:
    text, num_decoded = utf_8_decode(data, "replace", False)
    tail = data[num_decoded:]
    if tail[:1] == b"\xed" and tail[1:2] >= b"\xa0":
        # The head of a surrogate: Python waits for the rest, but it can't become a character.
        return _Split(text + _REPLACEMENT * len(tail), b"")
    return _Split(text, tail)


def _is_continued(tail: bytes, data: bytes) -> bool:
    """Return whether *data* goes on with the character that *tail* begins."""
    text, rest = _split_tail(tail + data[:1])
    # One character, whole or still incomplete; else the tail is one and the byte another.
    return len(text) + bool(rest) == 1


def _incomplete_tail(pieces: tuple[Piece, ...], token_ids: Sequence[int]) -> bytes:
    """Return the bytes of the unfinished character at the end of *token_ids*' text."""
    data = b""
    for token_id in reversed(token_ids):
        if token_id < len(pieces):
            data = to_bytes(pieces[token_id]) + data
        if len(data) >= _MAX_TAIL_BYTES:
            break
    return _split_tail(data).tail
