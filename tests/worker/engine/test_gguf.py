"""Converting a GGUF file of the demo model's kind, written here with mlx's own GGUF writer."""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from headwater.worker.engine.gguf import ConvertedModel, convert
from mlx_lm.models import llama
from tokenizers import Tokenizer

HIDDEN, HEADS, KV_HEADS, LAYERS = 64, 4, 2, 2
# Byte-level BPE writes a space as the letter G with a dot.
TOKENS = ["<|unk|>", "<|end|>", "a", "b", "1", "2", "Ġ", "ab", "Ġab", "Ã"]
MERGES = ["a b", "Ġ ab"]
TOKEN_TYPES = [3, 3, 1, 1, 1, 1, 1, 1, 1, 1]


def _metadata(**changes: Any) -> dict[str, Any]:
    numbers = {
        "llama.embedding_length": HIDDEN,
        "llama.feed_forward_length": 96,
        "llama.block_count": LAYERS,
        "llama.attention.head_count": HEADS,
        "llama.attention.head_count_kv": KV_HEADS,
        "llama.context_length": 128,
        "llama.vocab_size": len(TOKENS),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.padding_token_id": 1,
        "tokenizer.ggml.unknown_token_id": 0,
    }
    return {
        "general.architecture": "llama",
        **{name: mx.array(value, mx.uint32) for name, value in numbers.items()},
        "llama.rope.freq_base": mx.array(1e4, mx.float32),
        "llama.attention.layer_norm_rms_epsilon": mx.array(1e-5, mx.float32),
        "tokenizer.ggml.tokens": TOKENS,
        "tokenizer.ggml.merges": MERGES,
        "tokenizer.ggml.token_type": mx.array(TOKEN_TYPES, mx.int32),
        "tokenizer.chat_template": "{{ messages[0].content }}",
        **changes,
    }


def _arrays() -> dict[str, mx.array]:
    mx.random.seed(0)
    kv = HIDDEN * KV_HEADS // HEADS
    shapes = {
        "token_embd": (len(TOKENS), HIDDEN),
        "output_norm": (HIDDEN,),
    }
    for layer in range(LAYERS):
        shapes |= {
            f"blk.{layer}.attn_norm": (HIDDEN,),
            f"blk.{layer}.attn_q": (HIDDEN, HIDDEN),
            f"blk.{layer}.attn_k": (kv, HIDDEN),
            f"blk.{layer}.attn_v": (kv, HIDDEN),
            f"blk.{layer}.attn_output": (HIDDEN, HIDDEN),
            f"blk.{layer}.ffn_norm": (HIDDEN,),
            f"blk.{layer}.ffn_gate": (96, HIDDEN),
            f"blk.{layer}.ffn_up": (96, HIDDEN),
            f"blk.{layer}.ffn_down": (HIDDEN, 96),
        }
    return {f"{name}.weight": mx.random.normal(shape) for name, shape in shapes.items()}


def _converted(path: Path, arrays: dict[str, mx.array], **changes: Any) -> ConvertedModel:
    mx.save_gguf(str(path / "model.gguf"), arrays, _metadata(**changes))
    return convert(path / "model.gguf")


def test_mlx_lm_takes_every_weight_and_setting(tmp_path: Path) -> None:
    converted = _converted(tmp_path, _arrays())
    model = llama.Model(llama.ModelArgs.from_dict(converted.config))

    model.load_weights(list(converted.weights.items()))  # strict: none missing, none over

    assert model(mx.array([[2, 3]])).shape == (1, 2, len(TOKENS))
    assert converted.config["max_position_embeddings"] == 128
    assert converted.config["tie_word_embeddings"] is True


def test_a_head_of_its_own_is_kept(tmp_path: Path) -> None:
    head = mx.random.normal((len(TOKENS), HIDDEN))

    converted = _converted(tmp_path, _arrays() | {"output.weight": head})

    assert converted.config["tie_word_embeddings"] is False
    assert mx.array_equal(converted.weights["lm_head.weight"], head)


def test_values_stay_where_they_are_but_query_and_key_change_rows(tmp_path: Path) -> None:
    arrays = _arrays()

    weights = _converted(tmp_path, arrays).weights

    value = weights["model.layers.1.self_attn.v_proj.weight"]
    key = weights["model.layers.1.self_attn.k_proj.weight"]
    assert mx.array_equal(value, arrays["blk.1.attn_v.weight"])
    # Rows 0 and 1 of a head are dimensions 0 and head_dim / 2.
    before = arrays["blk.1.attn_k.weight"]
    assert mx.array_equal(key[0], before[0])
    assert mx.array_equal(key[HIDDEN // HEADS // 2], before[1])


def test_the_tokenizer_has_the_files_tokens_merges_and_specials(tmp_path: Path) -> None:
    converted = _converted(tmp_path, _arrays())
    tokenizer = Tokenizer.from_str(json.dumps(converted.tokenizer))

    assert [tokenizer.id_to_token(i) for i in range(len(TOKENS))] == TOKENS
    assert tokenizer.encode("ab ab12<|end|>").ids == [7, 8, 4, 5, 1]
    assert tokenizer.decode([7, 8, 4, 5, 1]) == "ab ab12"
    assert converted.tokenizer_config["eos_token"] == "<|end|>"
    assert converted.tokenizer_config["chat_template"] == "{{ messages[0].content }}"


def test_another_architecture_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="only llama is converted"):
        _converted(tmp_path, _arrays(), **{"general.architecture": "mamba"})
