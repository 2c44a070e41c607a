"""Grammars over a real kind of vocabulary: what may come next, and what never may."""

from typing import Any

import pytest
from headwater.schemas import (
    ChoiceFormat,
    GenerationJob,
    JsonObjectFormat,
    JsonSchemaFormat,
    RegexFormat,
    ResponseFormat,
)
from headwater.worker.errors import JobRejected
from headwater.worker.grammars import GrammarConstraint, Grammars
from headwater.worker.text import Vocabulary
from tokenizers import Tokenizer, decoders, models

from tests.worker.text.conftest import byte_fallback_tokenizer, byte_level_tokenizer

NUM_PADDING = 13
"""Ids of the model beyond those of the tokenizer."""


def job(**fields: Any) -> GenerationJob:
    return GenerationJob(job_id="j", model="m", prompt_token_ids=(1,), max_tokens=9, **fields)


class Setup:
    def __init__(self, tokenizer: Tokenizer) -> None:
        self.vocabulary = Vocabulary(tokenizer)
        self.size = len(self.vocabulary.pieces) + NUM_PADDING
        self.ends = [tokenizer.token_to_id("</s>"), tokenizer.token_to_id("<|im_end|>")]
        self.grammars = Grammars(self.vocabulary, self.size, self.ends)

    def start(self, response_format: ResponseFormat, **fields: Any) -> GrammarConstraint:
        return self.grammars.start(job(response_format=response_format, **fields))

    def allowed(self, constraint: GrammarConstraint, output: list[int]) -> set[int]:
        mask = constraint.allowed(output)
        return {token for token in range(self.size) if mask[token >> 3] >> (token & 7) & 1}

    def texts(self, constraint: GrammarConstraint, output: list[int]) -> set[bytes]:
        allowed = self.allowed(constraint, output)
        return {self.vocabulary.token_bytes(token) for token in allowed}

    def tokens(self, text: str) -> list[int]:
        return [self.vocabulary.pieces.index(char) for char in text]


@pytest.fixture(
    params=[byte_level_tokenizer, byte_fallback_tokenizer], ids=["byte level", "byte fallback"]
)
def setup(request: pytest.FixtureRequest) -> Setup:
    return Setup(request.param())


def test_a_choice_allows_its_texts_and_then_the_end(setup: Setup) -> None:
    constraint = setup.start(ChoiceFormat(choices=("xd", "end")))
    assert b"x" in setup.texts(constraint, [])
    assert all(b"xd".startswith(t) or b"end".startswith(t) for t in setup.texts(constraint, []))
    output = setup.tokens("xd")
    assert setup.texts(constraint, output[:1]) == {b"d"}
    assert setup.allowed(constraint, output) == set(setup.ends)
    assert setup.allowed(constraint, [*output, setup.ends[1]]) >= set(setup.ends)
    assert constraint.error() is None


def test_tokens_without_text_are_never_allowed(setup: Setup) -> None:
    constraint = setup.start(RegexFormat(regex="(.|\n)*"))
    allowed = setup.allowed(constraint, [])
    empty = {token for token in allowed if not setup.vocabulary.token_bytes(token)}
    assert empty == set(setup.ends)
    assert len(allowed) > 100


def test_a_character_may_come_in_pieces(setup: Setup) -> None:
    constraint = setup.start(ChoiceFormat(choices=("ô",)))
    first, second = "ô".encode()
    output = []
    for byte in (first, second):
        assert setup.texts(constraint, output) == {bytes([byte])}
        output += setup.allowed(constraint, output)
    assert setup.allowed(constraint, output) == set(setup.ends)


def test_outputs_under_one_format_do_not_disturb_each_other(setup: Setup) -> None:
    response_format = ChoiceFormat(choices=("xd", "xe"))
    one, two = (setup.start(response_format) for _ in range(2))
    assert setup.texts(one, setup.tokens("x")) == {b"d", b"e"}
    assert setup.texts(two, []) >= {b"x"}
    assert setup.allowed(one, setup.tokens("xd")) == set(setup.ends)
    assert setup.texts(two, setup.tokens("x")) == {b"d", b"e"}


def test_a_resumed_output_is_followed_from_its_published_tokens(setup: Setup) -> None:
    response_format = RegexFormat(regex="x+d")
    old, new = (setup.start(response_format) for _ in range(2))
    output = setup.tokens("xxx")
    for length in range(3):
        setup.allowed(old, output[:length])
    assert setup.allowed(new, output) == setup.allowed(old, output)


def test_an_output_that_breaks_its_grammar_may_not_go_on(setup: Setup) -> None:
    constraint = setup.start(RegexFormat(regex="x+d"))
    assert setup.allowed(constraint, setup.tokens("e")) == set()
    assert constraint.error()


@pytest.mark.parametrize(
    "response_format",
    [
        RegexFormat(regex="(x"),
        JsonSchemaFormat(json_schema={"type": "object", "uniqueItems": True}),
        JsonSchemaFormat(json_schema={"type": "integer", "minimum": 3, "maximum": 2}),
    ],
)
def test_a_format_that_cannot_be_enforced_is_the_jobs_fault(setup: Setup, response_format) -> None:
    with pytest.raises(JobRejected, match="can't be enforced") as caught:
        setup.start(response_format)
    assert caught.value.code == "bad_response_format"


def test_without_an_end_token_nothing_is_enforced_by_halves(setup: Setup) -> None:
    grammars = Grammars(setup.vocabulary, setup.size, [])
    with pytest.raises(JobRejected, match="no end-of-sequence token"):
        grammars.start(job(response_format=JsonObjectFormat()))


def test_without_token_texts_nothing_is_enforced_by_halves() -> None:
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    tokenizer.decoder = decoders.CTC()
    vocabulary = Vocabulary(tokenizer)
    assert vocabulary.pieces is None
    with pytest.raises(JobRejected, match="no texts of their own"):
        Grammars(vocabulary, 2, [1]).start(job(response_format=JsonObjectFormat()))
