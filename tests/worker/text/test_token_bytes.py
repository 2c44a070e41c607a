"""A token's bytes are what the tokenizer's own decoder makes of it in the middle of a text."""

import orjson
import pytest
from headwater.worker.text.token_bytes import UnsupportedDecoder, bytes_function
from tokenizers import Regex, Tokenizer, decoders, models

SUPPORTED = {
    "byte level": decoders.ByteLevel(),
    "metaspace": decoders.Metaspace(),
    "metaspace without prefix": decoders.Metaspace(prepend_scheme="never"),
    "metaspace of another sign": decoders.Metaspace(replacement="_"),
    "word piece": decoders.WordPiece(),
    "word piece without cleanup": decoders.WordPiece(cleanup=False),
    "word piece of another sign": decoders.WordPiece(prefix="@@"),
    "fuse": decoders.Fuse(),
    "llama": decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    ),
    "gemma": decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    ),
    "strip each token": decoders.Sequence([decoders.Strip("_", 1, 2), decoders.Fuse()]),
    "nested": decoders.Sequence(
        [decoders.Sequence([decoders.Replace("▁", "~")]), decoders.ByteLevel()]
    ),
}
TOKENS = [
    "x", "Ġx", "▁x", "▁▁", "x▁y", "_", "__x___", "##x", "##.", ".", "n't", "@@x", "<0x41>", "<0xE2>",
    "<0xZZ>", "<0x41", "é", "ñandú 🙂", "Ã", "Ċ", " ", "",
]  # fmt: skip


@pytest.mark.parametrize("name", SUPPORTED)
def test_it_is_what_the_decoder_adds_after_another_token(name):
    decoder = SUPPORTED[name]
    bytes_of = bytes_function(orjson.loads(decoder.__getstate__()))
    for token in TOKENS:
        if name == "strip each token" and len(token) < 4:
            continue  # tokenizers 0.23 panics where both ends reach the same character
        added = decoder.decode(["ab", token]).removeprefix("ab")
        assert bytes_of(token).decode(errors="replace") == added, token


def test_without_a_decoder_tokens_are_joined_by_spaces():
    tokenizer = Tokenizer(models.BPE(vocab={"ab": 0, "x": 1}, merges=[]))
    assert "ab" + bytes_function(None)("x").decode() == tokenizer.decode([0, 1])


@pytest.mark.parametrize(
    "decoder",
    [
        decoders.BPEDecoder(),
        decoders.CTC(),
        decoders.Sequence([decoders.BPEDecoder(), decoders.Fuse()]),
        decoders.Replace(Regex("a+"), "b"),
        decoders.Sequence([decoders.Fuse(), decoders.Replace("ab", "c")]),
        decoders.Sequence([decoders.Fuse(), decoders.Strip(" ", 0, 1)]),
        decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()]),
        decoders.Sequence([decoders.ByteLevel(), decoders.ByteFallback()]),
    ],
)
def test_a_decoder_that_looks_past_the_token_has_no_table(decoder):
    with pytest.raises(UnsupportedDecoder, match="decoder"):
        bytes_function(orjson.loads(decoder.__getstate__()))
