"""Three kinds of tokenizer, small enough to build in the run, and a naive reference."""

from collections.abc import Callable, Sequence

import pytest
from headwater.schemas import DeltaPart, GenerationJob
from headwater.worker.engine.demo_model import fetch_demo
from headwater.worker.text import SequenceText, Vocabulary
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

SPECIAL = ["<s>", "</s>", "<|im_end|>"]
WORDS = ["hello", "world", "END", "ďábel", "한국어", "the", "def", "return", "naïve", "x", "e", "d"]
CORPUS = [
    "The quick brown fox jumps over the lazy dog. def f(x): return x + 1\n",
    "한국어 텍스트와 이모지 🙂🌶️👩‍👩‍👧 ďábelské ódy עברית العربية 中文字符",
    "  indented\n\tcode { } <think> hello </think> naïve café",
]


def byte_level_tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return _with_added_tokens(tokenizer)


def byte_fallback_tokenizer() -> Tokenizer:
    """Build a vocabulary as SentencePiece's BPE has it: byte tokens, then pieces with ▁."""
    pieces = [*WORDS, *("▁" + word for word in WORDS), "▁", "▁▁", "▁▁▁▁", ",", ".", "🙂", "é"]
    tokens = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    vocab = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return _with_added_tokens(tokenizer)


def metaspace_tokenizer() -> Tokenizer:
    pieces = [*WORDS, *("▁" + word for word in WORDS), "▁", "▁▁", "a▁b", ",", ".", "🙂", "é", "각"]
    vocab = [(token, -float(index)) for index, token in enumerate([*SPECIAL, *pieces])]
    tokenizer = Tokenizer(models.Unigram(vocab, unk_id=0, byte_fallback=False))
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="always")
    return _with_added_tokens(tokenizer)


def demo_tokenizer() -> Tokenizer:
    return _with_added_tokens(Tokenizer.from_file(str(fetch_demo() / "tokenizer.json")))


def _with_added_tokens(tokenizer: Tokenizer) -> Tokenizer:
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.add_tokens([AddedToken("<tool call>", normalized=False), "ñandú🙂"])
    return tokenizer


BUILDERS: dict[str, Callable[[], Tokenizer]] = {
    "byte_level": byte_level_tokenizer,
    "byte_fallback": byte_fallback_tokenizer,
    "metaspace": metaspace_tokenizer,
    "demo": demo_tokenizer,
}


def _byte_of_char() -> dict[str, int]:
    """Invert ByteLevel's alphabet: Latin-1 stands for itself, the others in order."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    own = {char: ord(char) for char in alphabet if ord(char) < 256}
    rest = sorted(set(range(256)) - set(own.values()))
    return own | dict(zip([c for c in alphabet if ord(c) >= 256], rest, strict=True))


class Reference:
    """The reference text, worked out the slow way from the whole history."""

    def __init__(self, kind: str, tokenizer: Tokenizer) -> None:
        self.kind = kind
        self.tokenizer = tokenizer
        self._is_byte_level = kind in ("byte_level", "demo")
        self._byte_of_char = _byte_of_char()
        added = tokenizer.get_added_tokens_decoder().values()
        self._special = {token.content for token in added if token.special}

    def token_bytes(self, token_id: int) -> bytes:
        token = self.tokenizer.id_to_token(token_id)
        if token is None or token in self._special:
            return b""
        if self._is_byte_level:
            known = all(char in self._byte_of_char for char in token)
            return bytes(self._byte_of_char[c] for c in token) if known else token.encode()
        if self.kind == "byte_fallback" and token.startswith("<0x"):
            return bytes.fromhex(token[3:5])
        return token.replace("▁", " ").encode()

    def join(self, token_ids: Sequence[int]) -> bytes:
        return b"".join(map(self.token_bytes, token_ids))

    def text(self, prompt: Sequence[int], output: Sequence[int]) -> str:
        """Return the characters that have at least one byte of the output."""
        num_prompt_bytes = len(self.join(prompt))
        characters = split_characters(self.join([*prompt, *output]))
        return "".join(char for end, char in characters if end > num_prompt_bytes)

    def ends_inside_character(self, token_ids: Sequence[int]) -> bool:
        return is_incomplete(self.join(token_ids)[-3:])

    def has_broken_run(self, token_ids: Sequence[int]) -> bool:
        """Whether decode() of a byte-fallback tokenizer would replace valid bytes too."""
        runs: list[bytes] = [b""]
        for token_id in token_ids:
            token = self.tokenizer.id_to_token(token_id) or ""
            if token.startswith("<0x"):
                runs[-1] += self.token_bytes(token_id)
            elif token not in self._special:
                runs.append(b"")
        return any("\ufffd" in run.decode(errors="replace") for run in runs)


def split_characters(data: bytes) -> list[tuple[int, str]]:
    """Return each character of *data*, invalid ones replaced, with the position of its end."""
    characters = []
    start = 0
    while start < len(data):
        end, char = _next_character(data, start)
        characters.append((end, char))
        start = end
    return characters


def _next_character(data: bytes, start: int) -> tuple[int, str]:
    for end in range(start + 1, min(start + 4, len(data)) + 1):
        try:
            return end, data[start:end].decode()
        except UnicodeDecodeError:
            pass
    ends = range(start + 1, min(start + 3, len(data)) + 1)
    return max((e for e in ends if can_begin(data[start:e])), default=start + 1), "\ufffd"


def can_begin(head: bytes) -> bool:
    """Whether some character's encoding starts with *head* and is longer."""
    return head in PROPER_HEADS


PROPER_HEADS = frozenset(
    chr(code).encode()[:length]
    for code in range(0x80, 0x110000, 64)
    if not 0xD800 <= code < 0xE000
    for length in range(1, len(chr(code).encode()))
)


def is_incomplete(tail: bytes) -> bool:
    return any(can_begin(tail[start:]) for start in range(len(tail)))


@pytest.fixture(scope="session")
def lossy_characters() -> Callable[[bytes], list[tuple[int, str]]]:
    return split_characters


@pytest.fixture(scope="session")
def tokenizers() -> dict[str, Tokenizer]:
    return {name: build() for name, build in BUILDERS.items()}


@pytest.fixture(scope="session")
def vocabularies(tokenizers) -> dict[str, Vocabulary]:
    return {name: Vocabulary(tokenizer) for name, tokenizer in tokenizers.items()}


@pytest.fixture(params=list(BUILDERS))
def kind(request) -> str:
    return request.param


@pytest.fixture
def tokenizer(tokenizers, kind) -> Tokenizer:
    return tokenizers[kind]


@pytest.fixture
def vocabulary(vocabularies, kind) -> Vocabulary:
    return vocabularies[kind]


@pytest.fixture
def reference(kind, tokenizer) -> Reference:
    return Reference(kind, tokenizer)


@pytest.fixture(scope="session")
def make_job() -> Callable[..., GenerationJob]:
    def make(prompt: Sequence[int] = (5,), **fields) -> GenerationJob:
        fields = {"job_id": "j", "model": "m", "max_tokens": 1000} | fields
        return GenerationJob(prompt_token_ids=tuple(prompt), **fields)

    return make


@pytest.fixture(scope="session")
def joined() -> Callable[[Sequence[DeltaPart]], str]:
    """Join deltas as a reader does, which checks every position."""

    def join(parts: Sequence[DeltaPart]) -> str:
        text, num_tokens = "", 0
        for part in parts:
            assert part.start == num_tokens
            num_tokens += len(part.token_ids)
            for span in part.text:
                assert span.text
                assert span.text_start == len(text)
                text += span.text
        return text

    return join


class PlainTokens:
    """A vocabulary whose tokens are given strings, and texts made of them."""

    def __init__(self) -> None:
        self._ids: dict[str, int] = {}
        self._tokenizer = Tokenizer(models.BPE(vocab={"seed": 0}, merges=[]))
        self._tokenizer.decoder = decoders.Fuse()
        self._tokenizer.add_special_tokens(["<eos>"])

    @property
    def eos(self) -> int:
        return 1

    def ids(self, pieces: Sequence[str]) -> list[int]:
        for piece in pieces:
            if self._tokenizer.token_to_id(piece) is None:
                self._tokenizer.add_tokens([AddedToken(piece, normalized=False)])
        return [self._tokenizer.token_to_id(piece) for piece in pieces]

    def sequence_text(self, job: GenerationJob, **settings) -> SequenceText:
        return SequenceText(Vocabulary(self._tokenizer), job, **settings)

    def resume(self, job: GenerationJob, parts: Sequence[DeltaPart], **settings) -> SequenceText:
        return SequenceText.resume(Vocabulary(self._tokenizer), job, parts, **settings)


@pytest.fixture
def plain() -> PlainTokens:
    return PlainTokens()
