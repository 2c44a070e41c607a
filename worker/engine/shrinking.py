"""Small random models of any family, for checks that take milliseconds.

Configs name the same sizes differently, and families read what they need: every known size is
made small, what is unknown stays as the model's own config has it.
"""

import dataclasses
from collections.abc import Mapping
from types import ModuleType
from typing import Any, Final, cast

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.utils import tree_flatten, tree_map_with_path

VOCABULARY_SIZE: Final = 128
WINDOW: Final = 8
"""Tokens of every sliding window."""

_HIDDEN, _INNER, _HEADS, _KV_HEADS, _HEAD_DIM, _LAYERS, _EXPERTS = 32, 64, 4, 2, 8, 4, 4

_LAYER_COUNTS: Final = ("num_hidden_layers", "num_layers", "n_layer", "n_layers")
_SIZES: Final[dict[str, Any]] = {
    **dict.fromkeys(("vocab_size", "padded_vocab_size"), VOCABULARY_SIZE),
    **dict.fromkeys(
        ("hidden_size", "d_model", "n_embd", "model_dim", "hidden_dim", "lru_width"), _HIDDEN
    ),
    **dict.fromkeys(
        (
            "intermediate_size",
            "n_inner",
            "ffn_hidden_size",
            "expert_ffn_hidden_size",
            "moe_intermediate_size",
            "shared_expert_intermediate_size",
            "moe_shared_expert_intermediate_size",
            "shared_intermediate_size",
            "intermediate_size_mlp",
            "ff_intermediate_size",
            "block_ff_dim",
            "share_expert_dim",
            "dense_intermediate_size",
        ),
        _INNER,
    ),
    **dict.fromkeys(_LAYER_COUNTS, _LAYERS),
    **dict.fromkeys(
        ("num_attention_heads", "n_head", "n_heads", "num_heads", "swa_num_attention_heads"),
        _HEADS,
    ),
    **dict.fromkeys(
        (
            "num_key_value_heads",
            "num_kv_heads",
            "n_kv_heads",
            "num_attention_groups",
            "swa_num_key_value_heads",
        ),
        _KV_HEADS,
    ),
    **dict.fromkeys(
        (
            "head_dim",
            "swa_head_dim",
            "global_head_dim",
            "v_head_dim",
            "swa_v_head_dim",
            "qk_nope_head_dim",
            "qk_rope_head_dim",
            "kv_lora_rank",
            "q_lora_rank",
            "linear_key_head_dim",
            "linear_value_head_dim",
            "rotary_dim",
            "query_pre_attn_scalar",
        ),
        _HEAD_DIM,
    ),
    **dict.fromkeys(
        (
            "sliding_window",
            "sliding_window_size",
            "attention_window_size",
        ),
        WINDOW,
    ),
    **dict.fromkeys(
        (
            "num_experts",
            "n_routed_experts",
            "num_local_experts",
            "moe_num_experts",
            "linear_num_value_heads",
        ),
        _EXPERTS,
    ),
    **dict.fromkeys(
        ("num_experts_per_tok", "moe_topk", "moe_k", "top_k_experts", "linear_num_key_heads"), 2
    ),
    **dict.fromkeys(("n_group", "topk_group", "num_expert_group", "n_groups"), 1),
    **dict.fromkeys(("first_k_dense_replace", "num_dense_layers", "num_shared_experts"), 1),
    **dict.fromkeys(("state_size", "ssm_state_size", "mamba_d_state"), 8),
    **dict.fromkeys(("mamba_head_dim", "mamba_d_head"), 16),
    **dict.fromkeys(("mamba_num_heads", "mamba_n_heads"), 4),
    "max_position_embeddings": 1024,
}


_PERIODS: Final = (
    "sliding_window_pattern",
    "full_attention_interval",
    "layer_group_size",
    "attn_layer_period",
    "expert_layer_period",
    "global_attn_every_n_layers",
    "_sliding_window_pattern",
)
"""Every so many layers there is one of another kind."""
_MAX_WEIGHTS: Final = 5_000_000


class NotShrinkable(ValueError):
    """No small instance of a model can be built from its config."""


def small_model(family: ModuleType, config: Mapping[str, Any], seed: int = 0) -> Module:
    """Return a float32 instance of *family*, a module of mlx_lm.models, with random weights.

    *config* is what stands in a model's config.json; the same *seed* gives the same weights.
    Raises NotShrinkable where small sizes don't give a model.
    """
    mx.random.seed(seed)
    try:
        arguments = family.ModelArgs.from_dict(shrink(config, family.ModelArgs))
        model: Any = family.Model(arguments)
    except Exception as error:  # a family may raise anything on sizes that it does not expect
        raise NotShrinkable(f"{type(error).__name__}: {error}") from error
    weights: list[tuple[str, mx.array]] = []
    tree_flatten(model.parameters(), destination=weights)
    num_weights = sum(weight.size for _, weight in weights)
    if num_weights > _MAX_WEIGHTS:
        raise NotShrinkable(f"{num_weights} weights are left")
    model.update(tree_map_with_path(_draw, model.parameters()))
    model.eval()
    mx.eval(model.parameters())
    return cast(Module, model)


def shrink(config: Mapping[str, Any], arguments: type | None = None) -> dict[str, Any]:
    """Return *config* with small sizes; lists with an entry a layer keep their first ones.

    *arguments* is the dataclass that reads it: sizes that a config leaves to it are set, too.
    """
    defaults = _defaults(arguments)
    small = {
        name: shrink(value) if isinstance(value, Mapping) else value
        for name, value in config.items()
        if not name.startswith("quantization")
    }
    num_layers, lists = _layers(config)
    for name, size in _SIZES.items():
        if _is_size(config.get(name, defaults.get(name))):
            small[name] = num_layers if name in _LAYER_COUNTS else size
    for name in lists:
        small[name] = config[name][:num_layers]
    for name in ("rope_scaling", "rope_parameters"):
        # Factors for every dimension of a head fit no other head.
        factors = config.get(name)
        values = factors.values() if isinstance(factors, Mapping) else ()
        if any(isinstance(value, list) for value in values):
            small[name] = None
    return small


def _defaults(arguments: type | None) -> dict[str, Any]:
    if arguments is None:
        return {}
    fields = dataclasses.fields(arguments)
    return {
        each.name: 1 if each.default is dataclasses.MISSING else each.default for each in fields
    }


def _is_size(value: Any) -> bool:
    """Whether *value* switches something on that has a size."""
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0


def _layers(config: Mapping[str, Any]) -> tuple[int, list[str]]:
    """Return how many layers show every kind there is, and the lists with an entry a layer."""
    old = next((config[name] for name in _LAYER_COUNTS if config.get(name)), 0)
    lists = [
        name for name, value in config.items() if isinstance(value, list) and len(value) == old
    ]
    entries = list(zip(*(config[name] for name in lists), strict=True))
    firsts = [entries.index(entry) + 1 for entry in entries] if old else []
    periods = [config[name] for name in _PERIODS if isinstance(config.get(name), int)]
    needed = max([_LAYERS, *firsts, *periods])
    return min(needed, old) if old else needed, lists


def _draw(path: str, weight: mx.array) -> mx.array:
    """Draw matrices widely: with the usual start every position predicts nearly the same."""
    weight = weight.astype(mx.float32)
    if weight.ndim < 2 or "conv" in path:
        return weight + 0.1 * mx.random.normal(weight.shape)
    scale = 1.0 if "embed" in path else 1.5 * weight.shape[-1] ** -0.5
    return scale * mx.random.normal(weight.shape)
