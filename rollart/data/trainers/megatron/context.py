"""Sequences that ranks share position by position, so that the longest need not fit one device (context parallel).

A sequence is cut into twice as many pieces as there are ranks; each rank has one from the front and its mirror image
from the back, so that causal attention costs all of them the same. Keys and values are gathered, queries stay.

Invariant: what ranks gather is in the order of the sequence. What this file leaves out: the rest of attention.

Shape suffixes: T positions of a whole sequence, C those of one rank, X anything that is there per position.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

Group = Any
"""A process group, which torch does not always define."""


def places_of(length: int, rank: int, size: int) -> Tensor:
    """The positions that rank `rank` of `size` has of `length`, a multiple of 2 x size; all of them where size is 1."""
    pieces = torch.arange(length).chunk(2 * size)
    return torch.cat([pieces[rank], pieces[2 * size - 1 - rank]])


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, own_CX: Tensor, group: Group, added: bool) -> Tensor:
        size = dist.get_world_size(group)
        parts = [torch.empty_like(own_CX) for _ in range(size)]
        dist.all_gather(parts, own_CX.contiguous(), group=group)
        whole_TX = own_CX.new_empty(size * len(own_CX), *own_CX.shape[1:])
        for rank, part_CX in enumerate(parts):
            whole_TX[places_of(len(whole_TX), rank, size).to(own_CX.device)] = part_CX
        context.group, context.added = group, added
        return whole_TX

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        whole_TX, group = gradients[0].contiguous(), context.group
        if context.added:
            whole_TX = whole_TX.clone()
            dist.all_reduce(whole_TX, group=group)
        places_C = places_of(len(whole_TX), dist.get_rank(group), dist.get_world_size(group))
        return whole_TX[places_C.to(whole_TX.device)], None, None


def gathered_positions(own_CX: Tensor, group: Group, added: bool) -> Tensor:
    """[T, X] from every rank's [C, X]. `added`: the ranks do different things with it, so that gradients add up;
    otherwise they all do the same, and each has the whole gradient."""
    if dist.get_world_size(group) == 1:
        return own_CX
    whole_TX: Tensor = _Gather.apply(own_CX, group, added)
    return whole_TX
