"""What a config of each model family of mlx-lm must say besides sizes, which shrinking sets."""

import dataclasses
from types import ModuleType
from typing import Any, Final

_WINDOWS: Final = ["sliding_attention", "full_attention"] * 2
_YARN: Final = {
    "type": "yarn",
    "factor": 1.0,
    "original_max_position_embeddings": 1024,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "beta_fast": 32,
    "beta_slow": 1,
}

REQUIRED: Final[dict[str, Any]] = {
    "rms_norm_eps": 1e-5,
    "layer_norm_eps": 1e-5,
    "layer_norm_epsilon": 1e-5,
    "layernorm_epsilon": 1e-5,
    "norm_eps": 1e-5,
    "rope_theta": 1e4,
    "rope_scaling": None,
    "rope_parameters": {"rope_theta": 1e4, "rope_type": "default"},
    "partial_rotary_factor": 0.5,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "use_bias": False,
    "use_qkv_bias": True,
    "use_qk_norm": True,
    "use_conv_bias": True,
    "conv_bias": False,
    "conv_kernel": 4,
    "conv_L_cache": 3,
    "linear_conv_kernel_dim": 4,
    "linear_allow_neg_eigval": True,
    "time_step_rank": "auto",
    "time_step_limit": [0.0, 100.0],
    "mamba_proj_bias": False,
    "mlp_only_layers": [],
    "decoder_sparse_step": 1,
    "moe_layer_freq": 1,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "zero_expert_num": 1,
    "mla_scale_q_lora": True,
    "mla_scale_kv_lora": True,
    "layer_types": _WINDOWS,
    "logits_scaling": 1.0,
    "attention_multiplier": 0.35,
    "embedding_multiplier": 2.0,
    "residual_multiplier": 0.5,
    "dim_model_base": 32,
    "scale_depth": 1.4,
    "scale_emb": 2.0,
    "n_positions": 1024,
    "n_ctx": 1024,
}
"""Used where a family asks for it."""

_TEXT: Final[dict[str, Any]] = {
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rms_norm_eps": 1e-5,
    "vocab_size": 128,
    "rope_theta": 1e4,
    "tie_word_embeddings": False,
    "max_position_embeddings": 1024,
}
"""Of models whose text part has a config of its own, which shrinking knows no defaults of."""
_EXPERTS: Final = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "moe_intermediate_size": 64,
    "norm_topk_prob": True,
}
_DELTA_NET: Final = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 4,
}
_LATENT: Final = {
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.0,
    "norm_topk_prob": True,
}
_LFM2: Final = {
    "block_dim": 32,
    "block_multiple_of": 8,
    "block_ffn_dim_multiplier": 1.0,
    "block_auto_adjust_ff_dim": False,
    "block_ff_dim": 64,
    "full_attn_idxs": [1, 3],
}
_YARN_BY_POSITION: Final = {
    "rope_theta": 1e4,
    "llama_4_scaling_beta": 0.1,
    "original_max_position_embeddings": 1024,
}
_GEMMA3N: Final = {
    "num_kv_shared_layers": 2,
    "vocab_size_per_layer_input": 128,
    "sliding_window": 8,
    "rope_local_base_freq": 1e4,
    "final_logit_softcapping": 30.0,
    "layer_types": _WINDOWS,
    "activation_sparsity_pattern": [0.5, 0.5, 0.0, 0.0],
    "hidden_size_per_layer_input": 8,
    "altup_num_inputs": 2,
    "altup_coef_clip": 120.0,
    "altup_correct_scale": True,
    "altup_active_idx": 0,
    "laurel_rank": 8,
}
_GEMMA4: Final = {
    "num_kv_shared_layers": 2,
    "vocab_size_per_layer_input": 128,
    "hidden_size_per_layer_input": 8,
    "layer_types": _WINDOWS,
}
_INDEX: Final = {
    "num_local_experts": 4,
    "dense_intermediate_size": 64,
    "shared_intermediate_size": 64,
    "num_experts_per_tok": 2,
    "moe_layer_freq": [0, 1, 1, 1],
    "index_n_heads": 2,
    "index_head_dim": 8,
    "index_block_size": 4,
    "index_topk_blocks": 2,
    "sparse_attention_freq": [0, 0, 1, 1],
    "rotary_dim": 4,
}
_NAS_BLOCK: Final = {
    "attention": {"n_heads_in_group": 2, "no_op": False, "replace_with_linear": False},
    "ffn": {"ffn_mult": 2.0, "no_op": False, "replace_with_linear": False},
}


def _text(family: str, **own: Any) -> dict[str, Any]:
    return {"text_config": {**_TEXT, "model_type": family, **own}}


CONFIGS: Final[dict[str, dict[str, Any]]] = {
    "afm7": {"num_kv_reuse_layers": 2},
    "apertus": {"post_norm": False, "qk_norm": True},
    "baichuan_m1": {"sliding_window_layers": [0, 2], "conv_window": 2},
    "bailing_hybrid": {"layer_group_size": 2, "group_norm_size": 2, "head_dim": 8},
    "bailing_moe_linear": {"layer_group_size": 2, "group_norm_size": 2},
    "dbrx": {
        "ffn_config": {"ffn_hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2},
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 1e4},
    },
    "deepseek_v2": {"rope_scaling": _YARN, "topk_method": "greedy"},
    "exaone4": {"sliding_window_pattern": "LG"},
    "exaone_moe": {"is_moe_layer": [False, True, True, True]},
    "falcon_h1": {"mamba_d_ssm": 64},
    "gear": {
        "layer_types": ["conv_mixer", "sliding_attention", "full_attention", "conv_mixer"],
        "attn_logit_softcapping": 50.0,
    },
    "gemma3": _text(
        "gemma3_text", query_pre_attn_scalar=8, sliding_window=8, sliding_window_pattern=2
    ),
    "gemma3_text": {"sliding_window_pattern": 2},
    "gemma3n": _text("gemma3n_text", **_GEMMA3N),
    "gemma4": _text("gemma4_text", global_head_dim=8, sliding_window=8, **_GEMMA4),
    "gemma4_text": _GEMMA4,
    "glm_moe_dsa": {"index_head_dim": 8, "index_n_heads": 2, "index_topk": 8},
    "gpt_neox": {"rotary_emb_base": 10000, "rotary_pct": 0.5},
    "granitemoehybrid": {
        "layer_types": ["mamba", "attention"] * 2,
        "mamba_n_heads": 4,
        "mamba_d_head": 16,
        "mamba_d_state": 8,
        "mamba_d_conv": 4,
        "mamba_n_groups": 1,
    },
    "hunyuan": {
        "num_shared_expert": 1,
        "use_mixed_mlp_moe": False,
        "use_cla": False,
        "cla_share_factor": 2,
        "rope_scaling": {"alpha": 1.0, "factor": 1.0, "type": "dynamic"},
    },
    "jamba": {
        "attn_layer_offset": 1,
        "attn_layer_period": 2,
        "expert_layer_offset": 1,
        "expert_layer_period": 2,
        "mamba_d_conv": 4,
        "mamba_d_state": 8,
        "mamba_expand": 2,
    },
    "kimi_k25": _text("deepseek_v3", **_LATENT),
    "kimi_linear": {
        "linear_attn_config": {
            "kda_layers": [1, 2, 3],
            "full_attn_layers": [4],
            "num_heads": 4,
            "head_dim": 8,
            "short_conv_kernel_size": 4,
        },
        "model_max_length": 1024,
    },
    "kimi_vl": _text("deepseek_v3", **_LATENT),
    "lfm2": _LFM2,
    "lfm2-vl": _text("lfm2", norm_eps=1e-5, conv_bias=False, conv_L_cache=3, **_LFM2),
    "lfm2_moe": {"use_expert_bias": True, "full_attn_idxs": [1, 3]},
    "llama4_text": {"no_rope_layers": [1, 1, 1, 0]},
    "longcat_flash": {"attention_method": "MLA", "zero_expert_type": "identity"},
    "mellum": {"rope_parameters": {kind: {"rope_theta": 1e4} for kind in _WINDOWS}},
    "mimo_v2_flash": {
        "hybrid_layer_pattern": [1, 0, 1, 0],
        "moe_layer_freq": [0, 1, 1, 1],
        "add_swa_attention_sink_bias": True,
        "add_full_attention_sink_bias": False,
        "swa_rope_theta": 1e4,
    },
    "minicpm3": {"rope_scaling": {"original_max_position_embeddings": 1024}},
    "minimax_m3_vl": _text("minimax_m3", **_INDEX),
    "ministral3": {"rope_parameters": _YARN_BY_POSITION},
    "mistral3": _text("ministral3", rope_parameters=_YARN_BY_POSITION),
    "mistral4": {"rope_parameters": {**_YARN_BY_POSITION, **_YARN}},
    "nemotron": {"hidden_act": "relu2"},
    "nemotron-nas": {"block_configs": [_NAS_BLOCK] * 4},
    "nemotron_h": {
        "hybrid_override_pattern": "M*-M",
        "mamba_hidden_act": "silu",
        "mlp_hidden_act": "relu2",
        "head_dim": 8,
    },
    "olmo_hybrid": {"layer_types": ["linear_attention"] * 3 + ["full_attention"]},
    "openelm": {
        "num_transformer_layers": 2,
        "ffn_dim_divisor": 8,
        "num_query_heads": [4, 4],
        "num_kv_heads": [2, 2],
        "ffn_multipliers": [1.0, 2.0],
        "normalize_qk_projections": True,
    },
    "phi": {"partial_rotary_factor": 0.5},
    "pixtral": _text("llama"),
    "plamo": {"n_shared_head": 2},
    "qwen": {"kv_channels": 8},
    "qwen2_vl": _text("qwen2"),
    "qwen3": {"rope_theta": 1e4},
    "qwen3_5": _text("qwen3_5_text", **_DELTA_NET),
    "qwen3_5_moe": _text(
        "qwen3_5_moe_text", shared_expert_intermediate_size=64, **_EXPERTS, **_DELTA_NET
    ),
    "qwen3_vl": _text("qwen3"),
    "qwen3_vl_moe": _text("qwen3_moe", **_EXPERTS),
    "recurrent_gemma": {
        "conv1d_width": 4,
        "logits_soft_cap": 30.0,
        "block_types": ["recurrent", "attention"],
    },
    "rwkv7": dict.fromkeys(
        ("a_low_rank_dim", "v_low_rank_dim", "gate_low_rank_dim", "decay_low_rank_dim"), 8
    ),
    "spark2_5": {"rope_parameters": {kind: {"rope_theta": 1e4} for kind in _WINDOWS}},
    "step3p5": {"moe_top_k": 2, "layer_types": _WINDOWS},
}
"""By module of mlx_lm.models; those that need nothing of their own are left out."""

NOT_TRIED: Final[dict[str, str]] = {
    "bitnet": "it has a kernel for Metal only",
    "llama4": "its small experts don't fit together",
    "kimi_k3": "nobody has written a small config of it",
    "lille-130m": "its widths are multiples of 256",
    "muse_spark": "nobody has written a small config of it",
    "olmo": "it needs a package that mlx-lm does not bring",
    "phi3small": "it writes to token ids that a small vocabulary lacks",
    "prism_hadamard_qwen35": "its weights are packed in a way of their own",
}


def config_of(family: str, module: ModuleType) -> dict[str, Any]:
    """Return a config that a small instance can be built from."""
    needed = {
        each.name
        for each in dataclasses.fields(module.ModelArgs)
        if each.default is dataclasses.MISSING and each.default_factory is dataclasses.MISSING
    }
    required = {name: value for name, value in REQUIRED.items() if name in needed}
    return {"model_type": family, **required, **CONFIGS.get(family, {})}
