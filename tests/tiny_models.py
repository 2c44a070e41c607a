"""Tiny random float32 instances of mlx-lm's model families: real architectures, no downloads.

Heads are always grouped (fewer key heads than query heads), sliding windows are 8 tokens, the
vocabulary has 128 ids, and the same family and seed always give the same weights.
"""

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any, Final, cast
from unittest.mock import patch

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_map_with_path

VOCABULARY_SIZE: Final = 128
WINDOW: Final = 8

_ATTENTION: Final = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rms_norm_eps": 1e-5,
    "vocab_size": VOCABULARY_SIZE,
    "max_position_embeddings": 1024,
}
_EXPERTS: Final = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "moe_intermediate_size": 32,
}
_DELTA_NET: Final = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 4,
    "num_hidden_layers": 4,
}


def _llama() -> nn.Module:
    return _build("llama", {**_ATTENTION, "num_hidden_layers": 2, "tie_word_embeddings": False})


def _qwen3_moe() -> nn.Module:
    settings = {"rope_theta": 1e4, "tie_word_embeddings": False, "norm_topk_prob": True}
    return _build("qwen3_moe", {**_ATTENTION, **_EXPERTS, **settings, "num_hidden_layers": 2})


def _gemma3_text() -> nn.Module:
    settings = {
        "num_hidden_layers": 4,
        "query_pre_attn_scalar": 8,
        "sliding_window": WINDOW,
        "sliding_window_pattern": 2,
    }
    return _build("gemma3_text", {**_ATTENTION, **settings})


def _qwen3_5() -> nn.Module:
    module = import_module("mlx_lm.models.qwen3_5")
    settings = {**_ATTENTION, **_DELTA_NET, "model_type": "qwen3_5", "tie_word_embeddings": False}
    return module.TextModel(module.TextModelArgs.from_dict(settings))


def _qwen3_next() -> nn.Module:
    settings = {
        "shared_expert_intermediate_size": 32,
        "rope_theta": 1e4,
        "partial_rotary_factor": 0.5,
        "tie_word_embeddings": False,
        "norm_topk_prob": True,
    }
    return _build("qwen3_next", {**_ATTENTION, **_DELTA_NET, **_EXPERTS, **settings})


def _gpt_oss() -> nn.Module:
    settings = {
        "num_hidden_layers": 2,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": WINDOW,
        "rope_theta": 10000,
    }
    return _build("gpt_oss", {**_ATTENTION, **settings})


def _mamba2() -> nn.Module:
    settings = {
        "num_heads": 4,
        "head_dim": 16,
        "vocab_size": VOCABULARY_SIZE,
        "hidden_size": 32,
        "intermediate_size": 64,
        "state_size": 8,
        "num_hidden_layers": 2,
        "layer_norm_epsilon": 1e-5,
        "conv_kernel": 4,
        "n_groups": 1,
        "use_bias": False,
        "use_conv_bias": True,
        "tie_word_embeddings": False,
        "time_step_limit": (0.0, 100.0),
        "time_step_rank": "auto",
    }
    return _build("mamba2", settings)


TINY_FAMILIES: Final[Mapping[str, Callable[[], nn.Module]]] = {
    "llama": _llama,
    "qwen3_moe": _qwen3_moe,
    "gemma3_text": _gemma3_text,
    "qwen3_5": _qwen3_5,
    "mamba2": _mamba2,
    "qwen3_next": _qwen3_next,
    "gpt_oss": _gpt_oss,
}
"""The first five are the families that exactness is promised for; the others cover sinks and
the mixture of windows, recurrence and experts."""


def tiny_model(family: str, seed: int = 0) -> nn.Module:
    """Build *family*'s tiny model with the weights of *seed*; KeyError if there is none."""
    mx.random.seed(seed)
    return _with_wide_weights(TINY_FAMILIES[family]())


def tiny_variant(family: str, **changes: Any) -> nn.Module:
    """Build *family*'s tiny model with other settings; also of a family that is not in the table.

    Whatever settings it needs besides those of plain attention must be among *changes* then.
    """
    mx.random.seed(0)
    with patch.dict(cast(dict[str, Any], _ATTENTION), changes):
        if family in TINY_FAMILIES:
            return _with_wide_weights(TINY_FAMILIES[family]())
        return _with_wide_weights(_build(family, {**_ATTENTION, "num_hidden_layers": 2, **changes}))


def _with_wide_weights(model: nn.Module) -> nn.Module:
    model.update(tree_map_with_path(_spread, model.parameters()))
    model.eval()
    mx.eval(model.parameters())
    return model


def _spread(path: str, weight: mx.array) -> mx.array:
    """Draw matrices widely: with the usual start every position predicts nearly the same."""
    weight = weight.astype(mx.float32)
    if not path.endswith("weight") or weight.ndim < 2 or "conv" in path:
        return weight
    scale = 1.0 if "embed" in path else 1.5 * weight.shape[-1] ** -0.5
    return scale * mx.random.normal(weight.shape)


def _build(family: str, settings: Mapping[str, Any]) -> nn.Module:
    module = import_module(f"mlx_lm.models.{family}")
    return module.Model(module.ModelArgs.from_dict({"model_type": family, **settings}))
