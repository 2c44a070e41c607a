"""Deltas joined are the reference text, whatever the tokens and however they are cut."""

import random

import pytest
from headwater.worker.text import SequenceText, Vocabulary, start_detokenizer
from headwater.worker.text.detokenizer import ByteDetokenizer
from headwater.worker.text.vocabulary import to_bytes
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models


def all_text(vocabulary, prompt, output) -> str:
    detokenizer = start_detokenizer(vocabulary, prompt)
    return "".join(map(detokenizer.push, output)) + detokenizer.flush()


class TokenSource:
    """Random tokens: all of the vocabulary and past it, more cut characters than chance gives."""

    def __init__(self, draw: random.Random, vocabulary: Vocabulary) -> None:
        self._draw = draw
        self._size = len(vocabulary.pieces)
        self._single = single_bytes(vocabulary)

    def tokens(self, max_length: int) -> list[int]:
        draw, tokens = self._draw, []
        for _ in range(draw.randint(1, max_length)):
            if self._single and draw.random() < 0.3:
                head = draw.choice("é한🙂€\ufffd").encode()[: draw.randint(1, 4)]
                tokens += [self._single[byte] for byte in head]
            else:
                tokens.append(draw.randrange(self._size + 2))
        return tokens


def single_bytes(vocabulary: Vocabulary) -> dict[int, int]:
    """Return the tokens of one byte, by that byte; none where bytes are not tokens."""
    data = {to_bytes(piece): i for i, piece in enumerate(vocabulary.pieces)}
    found = {key[0]: i for key, i in data.items() if len(key) == 1}
    return found if len(found) > 128 else {}


def spell(vocabulary: Vocabulary, char: str, num_bytes: int) -> list[int]:
    """Return tokens for the first bytes of *char*, one byte each."""
    single = single_bytes(vocabulary)
    return [single[byte] for byte in char.encode()[:num_bytes]]


def check_random_sequences(num_cases, vocabulary, reference, make_job, joined) -> None:
    draw = random.Random(20261129)
    source = TokenSource(draw, vocabulary)
    num_inside = 0
    for _ in range(num_cases):
        prompt = source.tokens(8)
        output = source.tokens(30)
        text = SequenceText(vocabulary, make_job(prompt))
        parts = []
        for token_id in output:
            assert text.push(token_id) is None
            if draw.random() < 0.5:
                parts.append(text.take())
        text.finish()
        parts.append(text.take())
        given = joined([part for part in parts if part])
        assert given == reference.text(prompt, output)
        check_against_decode(reference, prompt, output, given)
        num_inside += reference.ends_inside_character(prompt)
    assert num_inside > 0 or reference.kind == "metaspace"


def check_against_decode(reference, prompt, output, given) -> None:
    """Where the tokenizer's own decode() defines the text, it is the reference."""
    anchor = reference.tokenizer.token_to_id("x")
    if reference.ends_inside_character(prompt) or (
        reference.kind == "byte_fallback" and reference.has_broken_run([*prompt, *output])
    ):
        return
    head = reference.tokenizer.decode([anchor, *prompt])
    assert head + given == reference.tokenizer.decode([anchor, *prompt, *output])


def test_deltas_of_random_tokens_join_to_the_reference_text(
    vocabulary, reference, make_job, joined
):
    check_random_sequences(1_000, vocabulary, reference, make_job, joined)


@pytest.mark.long
def test_deltas_of_ten_thousand_random_sequences_join_to_the_reference_text(
    vocabulary, reference, make_job, joined
):
    check_random_sequences(10_000, vocabulary, reference, make_job, joined)


ANY_BYTES = st.binary(max_size=5)
# Bytes that begin, continue or break characters at every edge that UTF-8 has.
EDGE_BYTES = st.lists(
    st.sampled_from([0x41, 0x80, 0x8F, 0x90, 0x9F, 0xA0, 0xBF, 0xC2, 0xE0, 0xED, 0xEF, 0xF0, 0xF4]),
    max_size=5,
).map(bytes)


@settings(max_examples=500, derandomize=True)
@given(st.lists(ANY_BYTES | EDGE_BYTES, max_size=12), st.integers(0, 12))
def test_any_bytes_in_any_pieces_give_the_characters_that_the_output_has_a_byte_of(
    lossy_characters, chunks, num_prompt
):
    prompt, output = chunks[:num_prompt], chunks[num_prompt:]
    detokenizer = ByteDetokenizer(tuple(chunks), range(len(prompt)))
    ids = range(len(prompt), len(prompt) + len(output))
    text = "".join(map(detokenizer.push, ids)) + detokenizer.flush()
    num_prompt_bytes = len(b"".join(prompt))
    whole = lossy_characters(b"".join(chunks))
    assert text == "".join(char for end, char in whole if end > num_prompt_bytes)
    assert "".join(char for _, char in whole) == b"".join(chunks).decode(errors="replace")


def test_a_surrogates_bytes_are_replaced_at_once():
    detokenizer = ByteDetokenizer((b"\xed", b"\xa0", b"\x80"))
    assert [detokenizer.push(i) for i in range(3)] == ["", "\ufffd\ufffd", "\ufffd"]
    assert detokenizer.flush() == ""


def test_a_prompt_that_ends_inside_a_character_shows_no_prompt_text(vocabularies):
    for kind in ("byte_level", "byte_fallback"):
        vocabulary = vocabularies[kind]
        first, second, third = spell(vocabulary, "한", 3)
        word = vocabulary.pieces.index("x")
        prompt = [word, first, second]
        assert all_text(vocabulary, prompt, [third, word]) == "한x"
        assert all_text(vocabulary, prompt, [word]) == "x"
        assert all_text(vocabulary, [word, first], [second, word]) == "\ufffdx"
        assert all_text(vocabulary, prompt, []) == ""


def test_a_completed_replacement_character_of_the_model_is_kept(vocabularies):
    vocabulary = vocabularies["byte_level"]
    first, second, third = spell(vocabulary, "\ufffd", 3)
    assert all_text(vocabulary, [first, second], [third]) == "\ufffd"


def test_a_special_token_inside_a_character_does_not_break_it(vocabularies):
    vocabulary = vocabularies["byte_level"]
    first, *rest = spell(vocabulary, "🙂", 4)
    assert all_text(vocabulary, [5], [first, 0, *rest]) == "🙂"
    assert all_text(vocabulary, [first, 0], rest) == "🙂"


def test_the_first_space_of_an_output_is_kept(vocabularies):
    for kind, space in (("byte_level", " "), ("byte_fallback", " "), ("metaspace", " ")):
        vocabulary = vocabularies[kind]
        pieces = vocabulary.pieces
        word = pieces.index("x")
        spaced = next(i for i, p in enumerate(pieces) if str(p).startswith(space) and len(p) > 2)
        for prompt in ([word], [0]):
            assert all_text(vocabulary, prompt, [spaced, word]) == pieces[spaced] + "x"
            assert all_text(vocabulary, prompt, [pieces.index(space)]) == space


def test_characters_of_several_tokens_come_whole(vocabularies):
    vocabulary = vocabularies["byte_fallback"]
    for text in ("ďábelské", "🙂🙂", "שלום", "中文", "🌶"):
        tokens = [i for char in text for i in spell(vocabulary, char, 4)]
        detokenizer = start_detokenizer(vocabulary, [5])
        deltas = [detokenizer.push(token) for token in tokens]
        assert "".join(deltas) == text
        assert detokenizer.flush() == ""


def test_a_space_token_in_the_middle_of_a_character_gives_one_replacement(vocabularies):
    vocabulary = vocabularies["byte_level"]
    (lead,) = spell(vocabulary, "é", 1)
    space = vocabulary.pieces.index(" ")
    detokenizer = start_detokenizer(vocabulary, [5])
    assert [detokenizer.push(lead), detokenizer.push(space)] == ["", "\ufffd "]


def test_an_unfinished_character_at_the_end_comes_as_one_replacement(vocabularies):
    vocabulary = vocabularies["byte_level"]
    assert all_text(vocabulary, [5], spell(vocabulary, "🙂", 3)) == "\ufffd"


def test_added_tokens_give_text_and_special_ones_none(vocabulary, tokenizer):
    shown = [tokenizer.token_to_id("<tool call>"), tokenizer.token_to_id("ñandú🙂")]
    hidden = tokenizer.token_to_id("<|im_end|>")
    prompt = [tokenizer.token_to_id("x")]
    assert all_text(vocabulary, prompt, [shown[0], hidden, shown[1]]) == "<tool call>ñandú🙂"


def test_ids_past_the_tokenizers_vocabulary_give_no_text(vocabulary):
    assert all_text(vocabulary, [5, 99_999], [99_999, 1_000_000]) == ""


def test_at_most_an_incomplete_character_is_held(vocabularies):
    vocabulary = vocabularies["byte_level"]
    detokenizer = start_detokenizer(vocabulary, list(range(50)) * 20)
    held = []
    for token_id in [*range(len(vocabulary.pieces))] * 10:
        detokenizer.push(token_id)
        held.append(detokenizer.num_held_bytes)
    assert max(held) <= 3


class CountingTokenizer:
    """decode() that notes how many tokens it was handed."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.num_tokens: list[int] = []

    def decode(self, token_ids: list[int]) -> str:
        self.num_tokens.append(len(token_ids))
        return self.tokenizer.decode(token_ids)


def suffix_tokenizer() -> Tokenizer:
    """A decoder whose text depends on the next token: a word's space comes with its successor."""
    words = ["he", "llo</w>", "world</w>", "a</w>", "b", "é</w>", "🙂</w>"]
    vocab = {word: index for index, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.decoder = decoders.BPEDecoder(suffix="</w>")
    tokenizer.add_special_tokens(["<s>"])
    return tokenizer


def test_a_decoder_that_looks_at_neighbours_is_followed_in_windows():
    tokenizer = suffix_tokenizer()
    vocabulary = Vocabulary(tokenizer)
    assert vocabulary.pieces is None
    draw = random.Random(7)
    for _ in range(300):
        prompt = draw.choices(range(7), k=draw.randint(1, 12))
        output = draw.choices(range(8), k=draw.randint(0, 30))
        head = tokenizer.decode(prompt)
        assert head + all_text(vocabulary, prompt, output) == tokenizer.decode([*prompt, *output])


def test_windows_are_bounded():
    vocabulary = Vocabulary(suffix_tokenizer())
    counting = CountingTokenizer(vocabulary.tokenizer)
    vocabulary.decode = counting.decode
    detokenizer = start_detokenizer(vocabulary, [1] * 500)
    for token_id in [2, 7, 3, 7, 7] * 100 + [7] * 500:
        detokenizer.push(token_id)
    assert max(counting.num_tokens) <= 48


def test_a_byte_level_window_shows_no_prompt_text(tokenizers):
    vocabulary = Vocabulary(tokenizers["byte_level"])
    tokens = spell(vocabulary, "🌶", 4)
    word = vocabulary.pieces.index("x")
    vocabulary.pieces = None
    assert all_text(vocabulary, [word, *tokens[:2]], tokens[2:]) == "🌶"
    assert all_text(vocabulary, [word, *tokens[:2]], [word]) == "x"


def test_windows_over_bytes_give_whole_characters(tokenizers, vocabularies):
    vocabulary = Vocabulary(tokenizers["byte_level"])
    pieces, vocabulary.pieces = vocabulary.pieces, None
    words = [i for i, piece in enumerate(pieces) if isinstance(piece, str)]
    draw = random.Random(9)
    for _ in range(200):
        chars = [draw.choice(["é", "한", "🙂", "🌶", ""]) for _ in range(12)]
        tokens = [
            i for c in chars for i in (*spell(vocabularies["byte_level"], c, 4), draw.choice(words))
        ]
        start = draw.randint(1, len(tokens))
        detokenizer = start_detokenizer(vocabulary, tokens[:start])
        deltas = [detokenizer.push(token) for token in tokens[start:]]
        expected = start_detokenizer(vocabularies["byte_level"], tokens[:start])
        assert deltas == [expected.push(token) for token in tokens[start:]]


def test_a_window_lets_bytes_out_that_never_become_a_character(tokenizers, vocabularies):
    vocabulary = Vocabulary(tokenizers["byte_level"])
    vocabulary.pieces = None
    (lead,) = spell(vocabularies["byte_level"], "🙂", 1)
    detokenizer = start_detokenizer(vocabulary, [5])
    assert "\ufffd" in "".join(detokenizer.push(lead) for _ in range(12))


def test_word_pieces_join_as_the_tokenizer_joins_them():
    vocab = {word: i for i, word in enumerate(["[UNK]", "un", "##believ", "##able", "it", "."])}
    tokenizer = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    tokenizer.decoder = decoders.WordPiece(prefix="##", cleanup=True)
    vocabulary = Vocabulary(tokenizer)
    assert vocabulary.pieces is not None
    assert all_text(vocabulary, [4], [1, 2, 3, 5]) == " unbelievable."


def test_a_table_that_disagrees_with_the_tokenizer_is_not_used(monkeypatch):
    tokenizer = Tokenizer(models.BPE(vocab={"hello": 0, "Ġworld": 1}, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    monkeypatch.setattr(
        "headwater.worker.text.vocabulary.bytes_function", lambda _: lambda token: token.encode()
    )
    vocabulary = Vocabulary(tokenizer)
    assert vocabulary.pieces is None
    assert all_text(vocabulary, [0], [1]) == " world"


def test_the_decoder_section_decides_not_the_look_of_the_tokens():
    vocab = {"hello": 0, "Ġworld": 1, "Ċ": 2}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    assert all_text(Vocabulary(tokenizer), [0], [1, 2]) == " world\n"
    tokenizer.decoder = decoders.Fuse()
    assert all_text(Vocabulary(tokenizer), [0], [1, 2]) == "ĠworldĊ"
    tokenizer.decoder = None
    assert all_text(Vocabulary(tokenizer), [0], [1, 2]) == " Ġworld Ċ"


def test_an_added_token_spelled_in_the_byte_alphabet_is_read_as_the_tokenizer_reads_it():
    tokenizer = Tokenizer(models.BPE(vocab={"hello": 0}, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens([AddedToken("Ġx", normalized=False), AddedToken("ñ", normalized=False)])
    for output in ([1], [2], [1, 2]):
        expected = tokenizer.decode([0, *output]).removeprefix("hello")
        assert all_text(Vocabulary(tokenizer), [0], output) == expected
