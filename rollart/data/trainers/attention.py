"""Attention over packed rows (`learn/packing.py`): rows are gathered, attend, and give back one result per token.

Invariant: a token attends exactly to the tokens of its row up to itself, as in a forward pass over rows. A call
without packed rows is transformers' own `sdpa`, as if this function were not there.
Left out: sliding windows, soft caps, sinks and position biases; a model that asks for one is refused.

Shapes: N packed tokens, R rows of a segment with C queries and W keys, Q query heads, H key-value heads, D head size,
X = heads x D, M queries of all segments.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from rollart.errors import TrainError
from rollart.learn.packing import Packed, Segment

ATTENTION = "rollart_packed"
UNSUPPORTED = ("softcap", "s_aux", "position_bias", "sliding_window")


def attend(
    module: Any,
    query_1QND: Tensor,
    key_1HND: Tensor,
    value_1HND: Tensor,
    attention_mask: Tensor | None,
    *,
    packed: Packed | None = None,
    scaling: float | None = None,
    **other: Any,
) -> tuple[Tensor, None]:
    """Attention as transformers calls it, once per layer; returns [1, N, Q, D]. Raises TrainError."""
    if packed is None:
        output: tuple[Tensor, None] = sdpa_attention_forward(
            module, query_1QND, key_1HND, value_1HND, attention_mask, scaling=scaling, **other
        )
        return output
    for name in UNSUPPORTED:
        if other.get(name) is not None:
            raise TrainError(f"attention with {name} cannot be packed")
    query_NQD, key_NHD, value_NHD = (each[0].transpose(0, 1) for each in (query_1QND, key_1HND, value_1HND))
    parts = [_attend(query_NQD, key_NHD, value_NHD, segment, scaling) for segment in packed.segments]
    out_MX = parts[0] if len(parts) == 1 else torch.cat(parts)
    return pick(out_MX, packed.collect_N).unflatten(-1, (query_NQD.shape[1], -1))[None], None


def _attend(query_NQD: Tensor, key_NHD: Tensor, value_NHD: Tensor, segment: Segment, scaling: float | None) -> Tensor:
    query_RQCD = _rows(query_NQD, segment.queries_RC)
    key_RHWD, value_RHWD = _rows(key_NHD, segment.keys_RW), _rows(value_NHD, segment.keys_RW)
    group = query_RQCD.shape[1] // key_RHWD.shape[1]
    if group > 1 and segment.mask_R1CW is not None and query_RQCD.device.type != "cpu":
        # With a mask, only the CPU's fused kernel lets query heads share a key-value head.
        key_RHWD, value_RHWD = (each.repeat_interleave(group, 1) for each in (key_RHWD, value_RHWD))
    out_RQCD = functional.scaled_dot_product_attention(
        query_RQCD,
        key_RHWD,
        value_RHWD,
        attn_mask=segment.mask_R1CW,
        is_causal=segment.mask_R1CW is None,
        scale=scaling,
        enable_gqa=query_RQCD.shape[1] != key_RHWD.shape[1],
    )
    return out_RQCD.transpose(1, 2).flatten(2).flatten(0, 1)


def _rows(each_NHD: Tensor, places_RT: Tensor) -> Tensor:
    """[R, H, T, D]."""
    return pick(each_NHD.flatten(1), places_RT).unflatten(-1, each_NHD.shape[1:]).transpose(1, 2)


def pick(each_NX: Tensor, places: Tensor) -> Tensor:
    """Rows of a matrix, any number of times each. Backward, this is faster on CPU than indexing."""
    return each_NX.index_select(0, places.flatten()).unflatten(0, places.shape)


AttentionInterface.register(ATTENTION, attend)
