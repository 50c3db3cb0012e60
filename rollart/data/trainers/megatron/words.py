"""A model's config in Megatron's words; models that it has none for are refused.

What this file leaves out: names of weights (`names.py`), and whether sizes divide (`fit.py`).
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.nn import functional

from rollart.config import Layout
from rollart.data.trainers.megatron.names import Shape
from rollart.errors import ConfigError
from rollart.sections import TrainConfig

FAMILIES = ("llama", "qwen2", "qwen3", "qwen3_moe")
LLAMA3 = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
"""What Megatron takes for granted."""
INSTEAD = "take trainer = 'fsdp2'"


def shape_of(config: Any) -> Shape:
    """What of a config of transformers the names depend on. Raises ConfigError for what Megatron is not known to hold.

    Megatron has more; but what is not tried here would train wrong without a word.
    """
    kind, rope = config.model_type, config.rope_parameters
    if kind not in FAMILIES:
        raise ConfigError(f"trainer: 'megatron' knows {', '.join(FAMILIES)}, not {kind!r}; {INSTEAD}")
    if rope.get("rope_type", "default") != "default" and any(rope.get(key) != LLAMA3[key] for key in LLAMA3):
        raise ConfigError(f"trainer: 'megatron' knows plain rotary positions and Llama 3's, not {rope}; {INSTEAD}")
    if kind != "qwen2" and (getattr(config, "attention_bias", False) or getattr(config, "mlp_bias", False)):
        raise ConfigError(f"trainer: 'megatron' knows the biases of Qwen2 alone; {INSTEAD}")
    if config.hidden_act != "silu":
        raise ConfigError(f"trainer: 'megatron' knows the activation silu, not {config.hidden_act!r}; {INSTEAD}")
    if getattr(config, "use_sliding_window", False):
        raise ConfigError(f"trainer: 'megatron' knows no sliding window; {INSTEAD}")
    if kind == "qwen3_moe":
        _check_mixture(config)
    return Shape(
        layers=config.num_hidden_layers,
        heads=config.num_attention_heads,
        key_value_heads=config.num_key_value_heads,
        vocabulary=config.vocab_size,
        tied=config.tie_word_embeddings,
        head_norms=kind.startswith("qwen3"),
        biases=kind == "qwen2",
        experts=config.num_experts if kind == "qwen3_moe" else 0,
    )


def _check_mixture(config: Any) -> None:
    if config.decoder_sparse_step != 1 or config.mlp_only_layers or not config.norm_topk_prob:
        raise ConfigError(
            "trainer: 'megatron' knows mixtures with experts in every layer, whose weights add up to 1 "
            f"(norm_topk_prob); {INSTEAD}"
        )


def settings(config: Any, shape: Shape, options: TrainConfig, layout: Layout) -> dict[str, Any]:
    """The arguments of Megatron's `TransformerConfig` that depend on the model and the run."""
    bf16 = options.precision == "bfloat16"
    kind = torch.bfloat16 if bf16 else torch.float32
    return {
        "num_layers": shape.layers,
        "hidden_size": config.hidden_size,
        "ffn_hidden_size": config.intermediate_size,
        "num_attention_heads": shape.heads,
        "num_query_groups": shape.key_value_heads,
        "kv_channels": getattr(config, "head_dim", None) or config.hidden_size // shape.heads,
        "layernorm_epsilon": config.rms_norm_eps,
        "normalization": "RMSNorm",
        "qk_layernorm": shape.head_norms,
        "add_bias_linear": False,
        "add_qkv_bias": shape.biases,
        "gated_linear_unit": True,
        "activation_func": functional.silu,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "bf16": bf16,
        "params_dtype": kind,
        "pipeline_dtype": kind,
        "tensor_model_parallel_size": layout.tensor,
        "pipeline_model_parallel_size": layout.pipeline,
        "context_parallel_size": layout.context,
        "expert_model_parallel_size": layout.expert,
        "expert_tensor_parallel_size": 1,
        "sequence_parallel": layout.tensor > 1,
        **(_mixture(config, shape) if shape.experts else {}),
    }


def _mixture(config: Any, shape: Shape) -> dict[str, Any]:
    return {
        "num_moe_experts": shape.experts,
        "moe_ffn_hidden_size": config.moe_intermediate_size,
        "moe_router_topk": config.num_experts_per_tok,
        "moe_router_load_balancing_type": "none",
        "moe_router_dtype": "fp32",
    }


def head(config: Any, shape: Shape, layout: Layout) -> dict[str, Any]:
    """The arguments of Megatron's `GPTModel`."""
    rope = config.rope_parameters
    scaled = rope.get("rope_type") == "llama3"
    return {
        "vocab_size": math.ceil(shape.vocabulary / layout.tensor) * layout.tensor,
        "max_sequence_length": config.max_position_embeddings,
        "share_embeddings_and_output_weights": shape.tied,
        "rotary_base": rope["rope_theta"],
        **({"rope_scaling": True, "rope_scaling_factor": rope["factor"]} if scaled else {}),
    }
