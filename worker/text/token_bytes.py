"""What one token adds to a text, worked out from a tokenizer's decoder section.

A token's bytes are those that it adds *in the middle* of a text. Rules for the start of a text
(a leading space that is stripped) are left out on purpose: an output continues its prompt.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

TextStep: TypeAlias = Callable[[str], str]
BytesOf: TypeAlias = Callable[[str], bytes]

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")

# WordPiece's cleanup, in the order in which the decoder applies it.
_CLEANUP = (
    (" .", "."),
    (" ?", "?"),
    (" !", "!"),
    (" ,", ","),
    (" ' ", "'"),
    (" n't", "n't"),
    (" 'm", "'m"),
    (" do not", " don't"),
    (" 's", "'s"),
    (" 've", "'ve"),
    (" 're", "'re"),
)


class UnsupportedDecoder(ValueError):
    """A decoder whose text for a token depends on its neighbours."""


def bytes_function(decoder: Mapping[str, Any] | None) -> BytesOf:
    """Return the function from a token's string to the bytes that it adds to a text.

    *decoder* is tokenizer.json's `decoder` section; None joins tokens with spaces.
    Raises UnsupportedDecoder when no such function exists.
    """
    if decoder is None:
        return lambda token: b" " + token.encode()
    plan = _Plan()
    for stage in _flatten(decoder):
        plan.add(stage)
    return plan.compile()


class _Plan:
    """A decoder's stages, put together into one function of a single token."""

    def __init__(self) -> None:
        self._steps: list[TextStep] = []
        self._to_bytes: BytesOf | None = None
        # After a fuse the stages see the whole text, no longer tokens.
        self._is_fused = False

    def add(self, stage: Mapping[str, Any]) -> None:
        """Take the next stage."""
        kind: str = stage["type"]
        if kind == "Fuse":
            self._is_fused = True
        elif kind == "Strip" and self._is_fused:
            _require(stage["stop"] == 0, "strips the end of the text")
        elif kind in _TO_BYTES:
            self._require_text(kind)
            self._to_bytes = _TO_BYTES[kind]
            self._is_fused |= kind == "ByteLevel"
        elif kind in _TEXT_STEPS:
            self._require_text(kind)
            self._steps.append(_TEXT_STEPS[kind](stage))
        else:
            raise UnsupportedDecoder(f"decoder {kind} does not work token by token")

    def compile(self) -> BytesOf:
        """Return the function of all stages."""
        steps, to_bytes = tuple(self._steps), self._to_bytes or str.encode

        def bytes_of(token: str) -> bytes:
            for step in steps:
                token = step(token)
            return to_bytes(token)

        return bytes_of

    def _require_text(self, kind: str) -> None:
        _require(
            self._to_bytes is None and not self._is_fused,
            f"{kind} comes after tokens were turned into bytes or joined",
        )


def _require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise UnsupportedDecoder(f"decoder {otherwise}")


def _flatten(decoder: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    if decoder.get("type") == "Sequence":
        for inner in decoder["decoders"]:
            yield from _flatten(inner)
    else:
        yield decoder


def _byte_alphabet() -> dict[str, int]:
    """Return ByteLevel's alphabet: printable Latin-1 stands for itself, the rest from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = sorted(set(range(256)) - set(printable))
    alphabet = {chr(byte): byte for byte in printable}
    alphabet.update({chr(0x100 + index): byte for index, byte in enumerate(others)})
    return alphabet


_ALPHABET = _byte_alphabet()


def _byte_level(token: str) -> bytes:
    try:
        return bytes([_ALPHABET[char] for char in token])
    except KeyError:
        # A token with a character outside the alphabet was added as plain text.
        return token.encode()


def _byte_fallback(token: str) -> bytes:
    match = _BYTE_TOKEN.fullmatch(token)
    return bytes([int(match[1], 16)]) if match else token.encode()


def _replace(stage: Mapping[str, Any]) -> TextStep:
    pattern, content = stage["pattern"], stage["content"]
    _require("String" in pattern, "replaces by a regular expression")
    return lambda token: token.replace(pattern["String"], content)


def _metaspace(stage: Mapping[str, Any]) -> TextStep:
    return lambda token: token.replace(stage["replacement"], " ")


def _strip(stage: Mapping[str, Any]) -> TextStep:
    def strip(token: str) -> str:
        start = _num_equal(token, stage["content"], stage["start"])
        stop = _num_equal(token[start:][::-1], stage["content"], stage["stop"])
        return token[start : len(token) - stop]

    return strip


def _num_equal(chars: str, char: str, limit: int) -> int:
    """Return how many of the first *limit* characters equal *char* without a break."""
    head = chars[:limit]
    return len(head) - len(head.lstrip(char))


def _word_piece(stage: Mapping[str, Any]) -> TextStep:
    prefix: str = stage["prefix"]

    def join(token: str) -> str:
        token = token[len(prefix) :] if token.startswith(prefix) else " " + token
        for dirty, clean in _CLEANUP if stage["cleanup"] else ():
            token = token.replace(dirty, clean)
        return token

    return join


_TO_BYTES: Mapping[str, BytesOf] = {"ByteLevel": _byte_level, "ByteFallback": _byte_fallback}
_TEXT_STEPS: Mapping[str, Callable[[Mapping[str, Any]], TextStep]] = {
    "Replace": _replace,
    "Metaspace": _metaspace,
    "Strip": _strip,
    "WordPiece": _word_piece,
}
