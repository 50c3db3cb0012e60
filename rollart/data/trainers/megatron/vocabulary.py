"""Log-probabilities and entropy from logits whose vocabulary is split over ranks.

Invariant: every rank of the group gets the same result, and its gradient is that of its own logits alone, so that the
layers before, which add up the gradients of the group, get each logit's once. What this file leaves out: the head.

Shape suffixes: N positions, V this rank's share of the vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

Group = Any
"""A process group, which torch does not always define."""


NEVER = -1e9
"""A logit of no probability, and still a number."""


class _Sum(torch.autograd.Function):
    """The sum over ranks, whose gradient every rank has already."""

    @staticmethod
    def forward(_context: Any, values: Tensor, group: Group) -> Tensor:
        summed = values.clone()
        dist.all_reduce(summed, group=group)
        return summed

    @staticmethod
    def backward(_context: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


def from_split_logits(
    logits_NV: Tensor, targets_N: Tensor, temperature: float, entropy_gradient: bool, group: Group, size: int
) -> tuple[Tensor, Tensor]:
    """(logprobs_N, entropy_N) under softmax(logits / temperature), as `scoring.from_logits` of whole logits.

    The shares are of one width and lie in the order of the group's ranks; what is beyond `size`, the whole vocabulary,
    only fills them up.
    """
    ids_V = torch.arange(logits_NV.shape[-1], device=logits_NV.device) + dist.get_rank(group) * logits_NV.shape[-1]
    scaled_NV = (logits_NV.float() / temperature).masked_fill(ids_V >= size, NEVER)
    highest_N = scaled_NV.detach().amax(-1)
    dist.all_reduce(highest_N, dist.ReduceOp.MAX, group=group)
    weights_NV = (scaled_NV - highest_N[:, None]).exp()
    sum_N = _summed(weights_NV.sum(-1), group)
    log_sum_N = sum_N.log() + highest_N
    places_N = targets_N - dist.get_rank(group) * logits_NV.shape[-1]
    here_N = (places_N >= 0) & (places_N < logits_NV.shape[-1])
    own_N = scaled_NV.gather(-1, places_N.masked_fill(~here_N, 0)[:, None]).squeeze(-1).masked_fill(~here_N, 0)
    logprobs_N = _summed(own_N, group) - log_sum_N
    with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
        entropy_N = log_sum_N - _summed((weights_NV * scaled_NV).sum(-1), group) / sum_N
    return logprobs_N, entropy_N


def _summed(values_N: Tensor, group: Group) -> Tensor:
    summed: Tensor = _Sum.apply(values_N, group)
    return summed
