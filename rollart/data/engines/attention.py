"""Attention over slots: all new tokens of all requests go through the model as one packed row.

Everything in a causal LM but attention works token by token, so the tokens of one step are laid end to end, [1, N],
without padding. A function registered with transformers' attention interface writes their keys and values into the
slots and lets each token attend to its own slot. A step has at most two segments of consecutive slots: those that
decode (one new token each) and those that prefill (padded to the longest, for attention only).

Invariant: a token attends exactly to positions 0..its own of its own slot.
Left out: sliding windows, soft caps, sinks and position biases; a model that asks for one is refused.

Shapes: N packed tokens, R slots of a segment, T new tokens per slot, Q query heads, H key-value heads,
G = Q / H, W attended width, D head size, S slots, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from rollart.data.engines.slots import Slots
from rollart.errors import GenerationError

ATTENTION = "rollart_slots"
WIDTH_STEP = 32
UNSUPPORTED = ("softcap", "s_aux", "position_bias")


@dataclass(frozen=True, slots=True)
class Segment:
    """`slots` attend with `num_new` tokens each; `packed` are their tokens in the packed row.

    `spread` maps a padded place to a packed token and `collect` back; both None when nothing is padded.
    """

    slots: slice
    packed: slice
    num_new: int
    width: int
    mask_R1XW: Tensor
    spread: Tensor | None = None
    collect: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """One forward pass: the packed tokens, where their keys and values go, who attends to what, whose logits count."""

    slots: Slots
    tokens_N: Tensor
    positions_N: Tensor
    write_NH: Tensor
    segments: tuple[Segment, ...]
    last: Tensor


@dataclass(frozen=True, slots=True)
class Work:
    """What one slot computes in a step: `tokens` from position `start` on."""

    slot: int
    start: int
    tokens: Sequence[int]


def plan(slots: Slots, decode: Sequence[Work], prefill: Sequence[Work], num_last: int, group: int) -> Plan:
    """Lay out one pass. `decode` and `prefill` are consecutive slots; the first `num_last` of them yield logits.

    Reserves the room that the tokens need. `group`: query heads per key-value head.
    """
    works = [*decode, *prefill]
    width = max(work.start + len(work.tokens) for work in works)
    slots.reserve(works[-1].slot + 1, width)
    device = slots.buffer_L2SHWD.device
    first_of_slot = slots.num_heads * slots.width
    tokens = [token for work in works for token in work.tokens]
    positions = [place for work in works for place in range(work.start, work.start + len(work.tokens))]
    bases = [work.slot * first_of_slot for work in works for _ in work.tokens]
    tokens_N, positions_N, bases_N = torch.tensor([tokens, positions, bases], device=device)
    write_NH = (bases_N + positions_N)[:, None] + slots.heads_H
    segments = []
    if decode:
        segments.append(_decode_segment(slots, decode, positions_N[: len(decode)]))
    if prefill:
        segments.append(_prefill_segment(slots, prefill, len(decode), group))
    ends = list(accumulate(len(work.tokens) for work in works[:num_last]))
    last = torch.tensor(ends, dtype=torch.long, device=device) - 1
    return Plan(slots, tokens_N, positions_N, write_NH.flatten(), tuple(segments), last)


def _decode_segment(slots: Slots, works: Sequence[Work], positions_R: Tensor) -> Segment:
    width = _rounded(max(work.start for work in works) + 1, slots)
    mask_R1XW = _mask(positions_R[:, None], width, slots)
    return Segment(slice(works[0].slot, works[-1].slot + 1), slice(0, len(works)), 1, width, mask_R1XW)


def _prefill_segment(slots: Slots, works: Sequence[Work], first: int, group: int) -> Segment:
    device = slots.buffer_L2SHWD.device
    lengths = [len(work.tokens) for work in works]
    longest, total = max(lengths), sum(lengths)
    width = _rounded(max(work.start + len(work.tokens) for work in works), slots)
    starts_R1 = torch.tensor([work.start for work in works], device=device)[:, None]
    mask_R1XW = _mask(starts_R1 + torch.arange(longest, device=device), width, slots)
    spread = collect = None
    if longest * len(works) != total:
        lengths_R1 = torch.tensor(lengths, device=device)[:, None]
        real_RT = torch.arange(longest, device=device) < lengths_R1
        collect = real_RT.flatten().nonzero()[:, 0]
        spread = torch.zeros(real_RT.numel(), dtype=torch.long, device=device)
        spread[collect] = torch.arange(total, device=device)
    return Segment(
        slots=slice(works[0].slot, works[-1].slot + 1),
        packed=slice(first, first + total),
        num_new=longest,
        width=width,
        mask_R1XW=mask_R1XW.repeat_interleave(group, dim=2),
        spread=spread,
        collect=collect,
    )


def _rounded(width: int, slots: Slots) -> int:
    return min(-(-width // WIDTH_STEP) * WIDTH_STEP, slots.width)


def _mask(positions_RT: Tensor, width: int, slots: Slots) -> Tensor:
    seen_RTW = slots.places_W[:width] <= positions_RT[:, :, None]
    return torch.where(seen_RTW, slots.zero, slots.minus_infinity)[:, None]


def attend(
    module: Any,
    query_1QND: Tensor,
    key_1HND: Tensor,
    value_1HND: Tensor,
    _mask: Tensor | None = None,
    *,
    plan: Plan | None = None,
    scaling: float | None = None,
    **other: Any,
) -> tuple[Tensor, None]:
    """Attention as transformers calls it, once per layer; returns [1, N, Q, D]. Raises GenerationError."""
    if plan is None:
        raise GenerationError("the model does not hand keyword arguments down to its attention")
    _refuse(plan.slots, other)
    keys_SHWD = plan.slots.keys_SHWD[module.layer_idx]
    values_SHWD = plan.slots.values_SHWD[module.layer_idx]
    head_dim = keys_SHWD.shape[-1]
    keys_SHWD.view(-1, head_dim).index_copy_(0, plan.write_NH, key_1HND[0].transpose(0, 1).reshape(-1, head_dim))
    values_SHWD.view(-1, head_dim).index_copy_(0, plan.write_NH, value_1HND[0].transpose(0, 1).reshape(-1, head_dim))
    query_NQD = query_1QND[0].transpose(0, 1)
    parts = [_attend_segment(query_NQD, keys_SHWD, values_SHWD, segment, scaling) for segment in plan.segments]
    return (parts[0] if len(parts) == 1 else torch.cat(parts))[None], None


def _attend_segment(
    query_NQD: Tensor, keys_SHWD: Tensor, values_SHWD: Tensor, segment: Segment, scaling: float | None
) -> Tensor:
    num_heads, head_dim = keys_SHWD.shape[1], keys_SHWD.shape[3]
    new, width = segment.num_new, segment.width
    query_TQD = query_NQD[segment.packed]
    if segment.spread is not None:
        query_TQD = query_TQD.index_select(0, segment.spread)
    query_RTHGD = query_TQD.reshape(-1, new, num_heads, query_TQD.shape[1] // num_heads, head_dim)
    # The queries that share a key-value head are stacked along the query axis: no repeated keys in memory.
    out_RHXD = scaled_dot_product_attention(
        query_RTHGD.transpose(1, 2).flatten(2, 3),
        keys_SHWD[segment.slots, :, :width],
        values_SHWD[segment.slots, :, :width],
        attn_mask=segment.mask_R1XW,
        scale=scaling,
    )
    out_TQD = out_RHXD.unflatten(2, (new, -1)).transpose(1, 2).reshape(-1, query_TQD.shape[1], head_dim)
    return out_TQD if segment.collect is None else out_TQD.index_select(0, segment.collect)


def _refuse(slots: Slots, options: dict[str, Any]) -> None:
    for name in UNSUPPORTED:
        if options.get(name) is not None:
            raise GenerationError(f"the model's attention uses {name}, which this engine does not support")
    window = options.get("sliding_window")
    if window is not None and window < slots.max_width:
        raise GenerationError(
            f"the model attends through a sliding window of {window} tokens; "
            f"lower max_model_tokens to {window} or take another engine"
        )


AttentionInterface.register(ATTENTION, attend)
