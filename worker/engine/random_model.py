"""Random models on disk: for runs that test or measure everything but what a model says."""

import json
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, Final

import mlx.core as mx
from mlx.utils import tree_map_with_path
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

_END: Final = 256
_ARGUMENTS: Final[dict[str, Any]] = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rms_norm_eps": 1e-5,
    "vocab_size": 257,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}


def write_random_model(
    directory: Path, *, seed: int = 0, config: Mapping[str, Any] = _ARGUMENTS
) -> Path:
    """Write a float32 model and a tokenizer of single bytes; return *directory*.

    *config* is what stands in config.json, by default a llama of 40 thousand weights. The same
    *seed* gives the same weights.
    """
    mx.random.seed(seed)
    family = import_module(f"mlx_lm.models.{config['model_type']}")
    model = family.Model(family.ModelArgs.from_dict(dict(config)))
    weights: dict[str, mx.array] = {}

    def draw(path: str, weight: mx.array) -> mx.array:
        # Convolutions have an order of axes of their own, and small sums.
        if weight.ndim > 1 and "conv" not in path:
            # Widely: with the usual start every position predicts nearly the same.
            scale = 1.0 if "embed" in path else 1.5 * weight.shape[-1] ** -0.5
            weight = scale * mx.random.normal(weight.shape)
        weights[path] = weight.astype(mx.float32)
        return weight

    tree_map_with_path(draw, model.parameters())
    mx.save_safetensors(str(directory / "model.safetensors"), weights, {"format": "mlx"})
    (directory / "config.json").write_text(json.dumps({**config, "eos_token_id": _END}))
    _byte_tokenizer().save(str(directory / "tokenizer.json"))
    return directory


def _byte_tokenizer() -> Any:
    # One token a byte, so that characters straddle tokens.
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: index for index, letter in enumerate(letters)} | {"<end>": _END}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>"])
    return tokenizer
