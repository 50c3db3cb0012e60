"""Layers that take the place of Megatron's own, so that no package of kernels is needed.

What this file leaves out: all other layers, which are Megatron's.

Shape suffixes: B rows, T positions, C positions of this rank, Q query heads, H key-value heads, D head size, X width,
E experts.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from torch import Tensor
from torch.nn import functional

from rollart.data.trainers.megatron.context import gathered_positions, places_of


class Attention(MegatronModule):
    """Causal attention of this rank's heads and positions, by torch's own kernels."""

    def __init__(self, config: Any, pg_collection: Any, softmax_scale: float | None = None, **_: Any) -> None:
        super().__init__(config=config)
        self._scale, self._group = softmax_scale, pg_collection.cp

    def forward(self, query_CBQD: Tensor, key_CBHD: Tensor, value_CBHD: Tensor, *_: Any, **__: Any) -> Tensor:
        """[C, B, Q x D], as Megatron calls it; its mask is not looked at."""
        mask_CT = None
        if (size := dist.get_world_size(self._group)) > 1:
            length = size * len(query_CBQD)
            places_C1 = places_of(length, dist.get_rank(self._group), size).to(query_CBQD.device)[:, None]
            mask_CT = torch.arange(length, device=query_CBQD.device) <= places_C1
        key_TBHD, value_TBHD = (gathered_positions(each, self._group, added=True) for each in (key_CBHD, value_CBHD))
        query_BQCD, key_BHTD, value_BHTD = (each.permute(1, 2, 0, 3) for each in (query_CBQD, key_TBHD, value_TBHD))
        out_BQCD = functional.scaled_dot_product_attention(
            query_BQCD,
            key_BHTD,
            value_BHTD,
            attn_mask=mask_CT,
            is_causal=mask_CT is None,
            scale=self._scale,
            enable_gqa=query_BQCD.shape[1] != key_BHTD.shape[1],
        )
        return out_BQCD.permute(2, 0, 1, 3).flatten(2)


class Norm(torch.nn.RMSNorm):
    """Megatron's own wrapper of it knows nothing of positions that ranks share out."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


class Router(TopKRouter):
    """Scores of the experts in float32; Megatron's own cannot do without Transformer Engine."""

    def gating(self, input: Tensor) -> Tensor:
        """input_CBX to scores_CBE."""
        return functional.linear(input.float(), self.weight.float())


def layers(config: Any, number: int) -> TransformerBlockSubmodules:
    """What `number` layers of a model are made of. `config`: a `TransformerConfig`."""
    spec = get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts, qk_layernorm=config.qk_layernorm, normalization="RMSNorm"
    )
    layer = spec.submodules
    layer.input_layernorm = layer.pre_mlp_layernorm = Norm
    layer.self_attention.submodules.core_attention = Attention
    if config.qk_layernorm:
        layer.self_attention.submodules.q_layernorm = layer.self_attention.submodules.k_layernorm = Norm
    if config.num_moe_experts:
        layer.mlp.submodules.router = Router
    return TransformerBlockSubmodules([spec] * number, layer_norm=Norm)
