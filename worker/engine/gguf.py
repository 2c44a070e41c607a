"""A llama-architecture GGUF file to what a standard MLX model directory holds.

The format is llama.cpp's GGUF; only the parts that the demo model uses are read.
"""

from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx

_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}

_GROUP_SIZE = 32
_CONTROL_TOKEN = 3


class ConvertedModel(NamedTuple):
    """What the directory's files are made of."""

    weights: dict[str, mx.array]
    config: dict[str, Any]
    tokenizer: dict[str, Any]
    tokenizer_config: dict[str, Any]


def convert(path: Path) -> ConvertedModel:
    """Read the GGUF file at *path*; raises ValueError for another architecture."""
    # mlx types the reply for all of its file formats; GGUF gives two dictionaries.
    loaded: Any = mx.load(str(path), return_metadata=True)
    arrays, metadata = loaded
    architecture = metadata.get("general.architecture")
    if architecture != "llama":
        raise ValueError(f"{path.name} holds a {architecture!r} model; only llama is converted")
    config = _config(metadata)
    weights = _weights(arrays, config)
    config["tie_word_embeddings"] = "lm_head.weight" not in weights
    return ConvertedModel(weights, config, _tokenizer(metadata), _tokenizer_config(metadata))


def _config(metadata: dict[str, Any]) -> dict[str, Any]:
    def number(key: str) -> Any:
        return metadata[f"llama.{key}"].item()

    hidden, heads = number("embedding_length"), number("attention.head_count")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": number("feed_forward_length"),
        "num_hidden_layers": number("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": number("attention.head_count_kv"),
        "head_dim": hidden // heads,
        "max_position_embeddings": number("context_length"),
        "rope_theta": number("rope.freq_base"),
        "rms_norm_eps": number("attention.layer_norm_rms_epsilon"),
        "vocab_size": number("vocab_size"),
        "bos_token_id": metadata["tokenizer.ggml.bos_token_id"].item(),
        "eos_token_id": metadata["tokenizer.ggml.eos_token_id"].item(),
    }


def _weights(arrays: dict[str, mx.array], config: dict[str, Any]) -> dict[str, mx.array]:
    weights = {}
    for name in [name for name in arrays if name.endswith(".weight")]:
        base = name.removesuffix(".weight")
        weight = _dequantized(arrays, base)
        if base.endswith(".attn_q"):
            weight = _unpermute(weight, config["num_attention_heads"])
        elif base.endswith(".attn_k"):
            weight = _unpermute(weight, config["num_key_value_heads"])
        weights[f"{_mlx_name(base)}.weight"] = weight
    return weights


def _mlx_name(base: str) -> str:
    if base in _TOP_NAMES:
        return _TOP_NAMES[base]
    _, layer, kind = base.split(".")
    return f"model.layers.{layer}.{_LAYER_NAMES[kind]}"


def _dequantized(arrays: dict[str, mx.array], base: str) -> mx.array:
    weight, scales = arrays[f"{base}.weight"], arrays.get(f"{base}.scales")
    if scales is None:
        return weight.astype(mx.float32)
    # Packed columns hold 32 bits; each scale stands for a group of columns.
    bits = weight.shape[1] * 32 // (scales.shape[1] * _GROUP_SIZE)
    return mx.dequantize(
        weight, scales, arrays[f"{base}.biases"], group_size=_GROUP_SIZE, bits=bits
    ).astype(mx.float32)


def _unpermute(weight: mx.array, num_heads: int) -> mx.array:
    """Undo the order of rows that llama.cpp gives query and key for its rotary embedding."""
    rows, columns = weight.shape
    by_half = weight.reshape(num_heads, rows // num_heads // 2, 2, columns)
    return by_half.swapaxes(1, 2).reshape(rows, columns)


def _tokenizer(metadata: dict[str, Any]) -> dict[str, Any]:
    """Return a tokenizer.json: byte-level BPE whose pre-tokenizer also splits digits."""
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    types: list[int] = metadata["tokenizer.ggml.token_type"].tolist()
    special = [i for i, kind in enumerate(types) if kind == _CONTROL_TOKEN]
    byte_level = {"add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [_added_token(i, tokens[i]) for i in special],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Digits", "individual_digits": True},
                {"type": "ByteLevel", **byte_level},
            ],
        },
        "post_processor": None,
        "decoder": {"type": "ByteLevel", **byte_level},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": {token: i for i, token in enumerate(tokens)},
            "merges": metadata["tokenizer.ggml.merges"],
        },
    }


def _added_token(token_id: int, content: str) -> dict[str, Any]:
    return {
        "id": token_id,
        "content": content,
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": True,
    }


def _tokenizer_config(metadata: dict[str, Any]) -> dict[str, Any]:
    tokens = metadata["tokenizer.ggml.tokens"]

    def token(kind: str) -> str:
        return str(tokens[metadata[f"tokenizer.ggml.{kind}_token_id"].item()])

    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "bos_token": token("bos"),
        "eos_token": token("eos"),
        "pad_token": token("padding"),
        "unk_token": token("unknown"),
        "model_max_length": metadata["llama.context_length"].item(),
        "chat_template": metadata["tokenizer.chat_template"],
    }
