"""A tiny model in a directory, as the scenarios load it."""

from pathlib import Path

import mlx.core as mx
import orjson
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models import llama
from tokenizers import Tokenizer, decoders, models, pre_tokenizers


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A llama of two layers whose tokens are the single bytes."""
    folder = tmp_path_factory.mktemp("tiny")
    config = {
        "model_type": "llama",
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "intermediate_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-5,
        "vocab_size": 257,
        "eos_token_id": 0,
        "tie_word_embeddings": True,
        "max_position_embeddings": 4096,
    }
    (folder / "config.json").write_bytes(orjson.dumps(config))
    _save_tokenizer(folder)
    mx.random.seed(0)
    model = llama.Model(llama.ModelArgs.from_dict(config))
    weights = dict(tree_flatten(model.parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    return str(folder)


def _save_tokenizer(folder: Path) -> None:
    # The text stage's self-check wants a word to stand before the tokens that it samples.
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "ab"]
    tokenizer = Tokenizer(models.BPE(vocab={each: i for i, each in enumerate(tokens)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_bytes(
        orjson.dumps({"tokenizer_class": "PreTrainedTokenizerFast"})
    )
