"""A model that nobody runs, and rows for it."""

import json

import pytest
from headwater.producer.bulk.preparation import Preparation
from headwater.producer.bulk.rows import RowParser, RowSettings
from headwater.schemas import ModelCard, TokenizerFiles
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

CONTEXT = 64


@pytest.fixture(scope="session")
def files() -> TokenizerFiles:
    """A tokenizer of single bytes, with a chat template."""
    letters = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(letters, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    return TokenizerFiles(tokenizer=json.loads(tokenizer.to_str()), chat_template=template)


@pytest.fixture(scope="session")
def card(files: TokenizerFiles) -> ModelCard:
    """The model's card."""
    return ModelCard(
        alias="tiny",
        source="nowhere",
        vocab_size=256,
        context_length=CONTEXT,
        tokenizer_fingerprint=files.fingerprint,
    )


@pytest.fixture(scope="session")
def preparation(files: TokenizerFiles, card: ModelCard) -> Preparation:
    """What makes rows of lines."""
    return Preparation(RowSettings("tiny", defaults={"max_tokens": 4}), card, files)


@pytest.fixture(scope="session")
def parser(preparation: Preparation) -> RowParser:
    """A parser of its rows."""
    return preparation.parser()
