"""Vocabulary: the text pieces of a tokenizer's tokens, built once per model."""

import random
from collections.abc import Iterator
from typing import NamedTuple, TypeAlias

import orjson
import structlog
from tokenizers import Tokenizer

from .token_bytes import UnsupportedDecoder, bytes_function

Piece: TypeAlias = str | bytes
"""A token's text; bytes where it is not whole UTF-8 by itself."""

_NUM_CHECKED_TOKENS = 512
_NUM_CHECKED_RUNS = 64
_CHECKED_RUN_LENGTH = 8

log = structlog.get_logger(__name__)


class Disagreement(NamedTuple):
    """Token ids whose table text is not what the tokenizer's own decode() gives."""

    token_ids: tuple[int, ...]
    expected: str
    given: str


class Vocabulary:
    """What each token adds to a text, or the tokenizer itself where that depends on neighbours.

    Special tokens give no text, other added tokens do, ids that the tokenizer does not know
    give none: as in `Tokenizer.decode(ids, skip_special_tokens=True)`.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Build the table and check it against the tokenizer's own decode()."""
        self.tokenizer = tokenizer
        self.pieces: tuple[Piece, ...] | None = _checked_pieces(tokenizer)
        """By token id; None where no table can be made."""
        added = tokenizer.get_added_tokens_decoder()
        self.added_texts = {token_id: token.content for token_id, token in added.items()}
        """Added tokens, special or not, as they are written, by token id."""
        self.special_texts = {
            token_id: token.content for token_id, token in added.items() if token.special
        }
        """Those of them that add no text."""

    def token_bytes(self, token_id: int) -> bytes:
        """Return what one token adds to a text; needs the table of pieces."""
        assert self.pieces is not None
        return to_bytes(self.pieces[token_id]) if token_id < len(self.pieces) else b""

    def shown_bytes(self, token_id: int) -> bytes:
        """Return the bytes of one token as they are shown to a reader: a special one by name."""
        piece = self.pieces[token_id] if self.pieces and token_id < len(self.pieces) else ""
        if not piece:
            piece = self.tokenizer.decode([token_id], skip_special_tokens=False)
        return to_bytes(piece)

    def decode(self, token_ids: list[int]) -> str:
        """Return the tokenizer's own text of *token_ids*, special tokens left out."""
        return self.tokenizer.decode(token_ids, skip_special_tokens=True)


def to_bytes(piece: Piece) -> bytes:
    """Return the bytes of a piece."""
    return piece.encode() if isinstance(piece, str) else piece


def _checked_pieces(tokenizer: Tokenizer) -> tuple[Piece, ...] | None:
    try:
        pieces = _build_pieces(tokenizer)
    except UnsupportedDecoder as error:
        log.warning("detokenizer_without_table", reason=str(error))
        return None
    disagreement = find_disagreement(tokenizer, pieces)
    if disagreement is not None:
        log.warning("detokenizer_table_disagrees", token_ids=disagreement.token_ids)
        return None
    return pieces


def _build_pieces(tokenizer: Tokenizer) -> tuple[Piece, ...]:
    decoder = tokenizer.decoder
    section = None if decoder is None else orjson.loads(decoder.__getstate__())
    bytes_of = bytes_function(section)
    special = _special_ids(tokenizer)
    size = 1 + max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
    tokens = (None if i in special else tokenizer.id_to_token(i) for i in range(size))
    return tuple("" if token is None else _piece(bytes_of(token)) for token in tokens)


def _special_ids(tokenizer: Tokenizer) -> set[int]:
    added = tokenizer.get_added_tokens_decoder()
    return {token_id for token_id, token in added.items() if token.special}


def _piece(data: bytes) -> Piece:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return data


def find_disagreement(tokenizer: Tokenizer, pieces: tuple[Piece, ...]) -> Disagreement | None:
    """Compare *pieces* with decode() on sample ids, alone and in runs; None when all agree."""
    anchor = _anchor(pieces)
    if anchor is None:
        return Disagreement((), "a token with plain text", "none")
    head = tokenizer.decode([anchor])
    for run in _sample_runs(pieces):
        expected = tokenizer.decode([anchor, *run])
        given = head + b"".join(to_bytes(pieces[i]) for i in run).decode(errors="replace")
        if given != expected:
            return Disagreement(run, expected, given)
    return None


def _anchor(pieces: tuple[Piece, ...]) -> int | None:
    """Return a token to stand before the sampled ones, so that no rule for a text's start acts.

    It has two letters at least: a token of one may be a byte token, whose text depends on the
    byte tokens after it.
    """
    texts = ((i, piece) for i, piece in enumerate(pieces) if isinstance(piece, str))
    return next((i for i, t in texts if len(t) > 1 and t.isascii() and t.isalpha()), None)


def _sample_runs(pieces: tuple[Piece, ...]) -> Iterator[tuple[int, ...]]:
    """Yield single tokens spread over the vocabulary, then runs of whole ones, seeded."""
    stride = max(1, len(pieces) // _NUM_CHECKED_TOKENS)
    yield from ((token_id,) for token_id in range(0, len(pieces), stride))
    # Byte-fallback decoders replace a whole run of byte tokens when one of them is invalid;
    # we replace the invalid bytes only, so runs are compared where there are none.
    whole = [i for i, piece in enumerate(pieces) if isinstance(piece, str)]
    draw = random.Random(0)  # noqa: S311 - a fixed sample, no secret
    for _ in range(_NUM_CHECKED_RUNS):
        yield tuple(draw.choices(whole, k=_CHECKED_RUN_LENGTH))
