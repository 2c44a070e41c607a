"""Random models of the kinds whose caches can't be cut anywhere, of a size for a CPU."""

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from ..engine.random_model import write_random_model
from .scenario import BenchError
from .sides import Lab

_HIDDEN: Final = 512
_LAYERS: Final = 8
_VOCABULARY: Final = 4096

_ATTENTION: Final[dict[str, Any]] = {
    "hidden_size": _HIDDEN,
    "intermediate_size": 1536,
    "num_hidden_layers": _LAYERS,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "rms_norm_eps": 1e-5,
    "vocab_size": _VOCABULARY,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
}
CONFIGS: Final[dict[str, dict[str, Any]]] = {
    "hybrid": {
        "model_type": "qwen3_5",
        "text_config": {
            **_ATTENTION,
            "model_type": "qwen3_5_text",
            "linear_num_value_heads": 8,
            "linear_num_key_heads": 4,
            "linear_key_head_dim": 64,
            "linear_value_head_dim": 64,
            "linear_conv_kernel_dim": 4,
            "full_attention_interval": 4,
        },
    },
    "sliding": {
        **_ATTENTION,
        "model_type": "gemma3_text",
        "query_pre_attn_scalar": 64,
        "sliding_window": 256,
        "sliding_window_pattern": 4,
    },
    "recurrent": {
        "model_type": "mamba2",
        "num_heads": 16,
        "head_dim": 64,
        "vocab_size": _VOCABULARY,
        "hidden_size": _HIDDEN,
        "intermediate_size": 1024,
        "state_size": 64,
        "num_hidden_layers": _LAYERS,
        "layer_norm_epsilon": 1e-5,
        "conv_kernel": 4,
        "n_groups": 1,
        "use_bias": False,
        "use_conv_bias": True,
        "tie_word_embeddings": False,
        "time_step_limit": (0.0, 100.0),
        "time_step_rank": "auto",
    },
}
"""By kind: gated delta nets with full attention in every fourth layer, sliding windows with the
same, and a state space model."""


def random_lab(kind: str) -> Lab:
    """Return a lab with a random model of *kind*, a key of CONFIGS; else raises BenchError."""
    if kind not in CONFIGS:
        raise BenchError(f"no model kind {kind!r}; choose one of {', '.join(CONFIGS)}")
    with TemporaryDirectory(prefix="headwater-bench-") as folder:
        return Lab(str(write_random_model(Path(folder), config=CONFIGS[kind])))
