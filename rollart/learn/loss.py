"""Policy losses as values of one setting, summed over tokens so that micro-batches add up exactly.

    behaviour  generated the tokens (older weights, the engine's arithmetic); recorded with the trajectory
    proximal   the weights when this train_step began; equal to the current ones in its first mini-batch
    current    the weights being trained

Every loss corrects for behaviour -> proximal by a truncated importance weight and limits proximal -> current by its
own clip, as decoupled PPO does (arXiv 2110.00641; AReaL, arXiv 2505.24298). Invariant: entries outside the mask
change nothing. The caller divides by the number of trained tokens in the whole mini-batch.
What this file leaves out: the model, the optimizer, and advantages (`learn.advantage`).

Shape suffixes: B rows of a micro-batch, T positions. Masks are bool, everything else float.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from rollart.sections import TrainConfig

MAX_LOG_RATIO = 20.0
"""Log-ratios are held within +-20, so that exp never overflows; clips and caps act long before."""


@dataclass(frozen=True, eq=False)
class PolicyTokens:
    """What a loss sees of one micro-batch. Gradients flow through `logprobs_BT` alone."""

    logprobs_BT: Tensor
    proximal_BT: Tensor
    behaviour_BT: Tensor
    advantages_BT: Tensor
    mask_BT: Tensor


PolicyLoss = Callable[[PolicyTokens, TrainConfig], tuple[Tensor, Tensor]]
"""Returns (loss_BT, clipped_BT): the loss of every token, and where a clip took its gradient or held its weight."""


def ppo(tokens: PolicyTokens, options: TrainConfig) -> tuple[Tensor, Tensor]:
    """PPO-clip against the proximal policy, times the truncated importance weight w.

    -w min(r A, clip(r, 1 - clip_low, 1 + clip_high) A), r = current / proximal, w = min(proximal / behaviour, tis_cap).
    Source: PPO (arXiv 1707.06347) eq. 7; asymmetric clip, DAPO (arXiv 2503.14476) section 3.1.
    """
    ratio_BT = _ratio(tokens.logprobs_BT, tokens.proximal_BT)
    weight_BT = _ratio(tokens.proximal_BT, tokens.behaviour_BT).clamp(max=options.tis_cap)
    objective_BT, clipped_BT = _clipped(ratio_BT, tokens.advantages_BT, options)
    return -weight_BT * objective_BT, clipped_BT


def gspo(tokens: PolicyTokens, options: TrainConfig) -> tuple[Tensor, Tensor]:
    """PPO-clip with one length-normalised ratio per sequence: s = exp(mean over its trained tokens of log r).

    The importance weight is taken per sequence in the same way. Each trained token carries its sequence's loss, so
    that the normalisation is the token mean of all losses (the source averages sequences). The source's clips are
    about 3e-4 and 4e-4: set `clip_low` and `clip_high` accordingly. Source: GSPO (arXiv 2507.18071) eq. 5 to 7.
    """
    ratio_BT = _sequence_ratio(tokens.logprobs_BT, tokens.proximal_BT, tokens.mask_BT)
    weight_BT = _sequence_ratio(tokens.proximal_BT, tokens.behaviour_BT, tokens.mask_BT).clamp(max=options.tis_cap)
    objective_BT, clipped_BT = _clipped(ratio_BT, tokens.advantages_BT, options)
    return -weight_BT * objective_BT, clipped_BT


def cispo(tokens: PolicyTokens, options: TrainConfig) -> tuple[Tensor, Tensor]:
    """REINFORCE whose importance weight is clipped and carries no gradient, so that no token loses its gradient.

    -w clip(r, 1 - clip_low, 1 + clip_high) A log p, both factors detached. Source: CISPO, MiniMax-M1
    (arXiv 2506.13585) section 3.1.
    """
    ratio_BT = _ratio(tokens.logprobs_BT.detach(), tokens.proximal_BT)
    bounded_BT = ratio_BT.clamp(1 - options.clip_low, 1 + options.clip_high)
    weight_BT = _ratio(tokens.proximal_BT, tokens.behaviour_BT).clamp(max=options.tis_cap)
    return -weight_BT * bounded_BT * tokens.advantages_BT * tokens.logprobs_BT, bounded_BT != ratio_BT


def reinforce(tokens: PolicyTokens, options: TrainConfig) -> tuple[Tensor, Tensor]:
    """-min(current / behaviour, tis_cap) A log p, the weight detached; with 'rloo' or 'reinforce_pp' advantages.

    Source: Williams 1992; truncated importance sampling, Ionides 2008.
    """
    ratio_BT = _ratio(tokens.logprobs_BT.detach(), tokens.behaviour_BT)
    weight_BT = ratio_BT.clamp(max=options.tis_cap)
    return -weight_BT * tokens.advantages_BT * tokens.logprobs_BT, weight_BT != ratio_BT


LOSSES: Mapping[str, PolicyLoss] = {"ppo": ppo, "gspo": gspo, "cispo": cispo, "reinforce": reinforce}
"""What `train.loss` chooses from."""
METRICS = ("ratio", "clip_fraction", "importance_weight", "tis_fraction", "kl_behaviour", "entropy")


def summed_loss(
    tokens: PolicyTokens, entropy_BT: Tensor, reference_BT: Tensor | None, options: TrainConfig
) -> tuple[Tensor, dict[str, float]]:
    """The sum over trained tokens of policy loss + kl_coef KL - entropy_coef entropy, and the sums of the metrics.

    `reference_BT`: log-probabilities under the reference policy, or None without one. Divide both results by the
    number of trained tokens of the whole mini-batch. Entropy counts in the gradient only if `entropy_coef` > 0.
    """
    loss_BT, clipped_BT = LOSSES[options.loss](tokens, options)
    kl_BT = torch.zeros_like(loss_BT) if reference_BT is None else k3(reference_BT, tokens.logprobs_BT)
    if reference_BT is not None:
        loss_BT = loss_BT + options.kl_coef * kl_BT
    if options.entropy_coef:
        loss_BT = loss_BT - options.entropy_coef * entropy_BT
    metrics = _metrics(tokens, clipped_BT, options)
    metrics["entropy"] = entropy_BT
    if reference_BT is not None:
        metrics["kl_reference"] = kl_BT
    sums = torch.stack([_sum(value_BT.detach(), tokens.mask_BT) for value_BT in metrics.values()]).tolist()
    return _sum(loss_BT, tokens.mask_BT), dict(zip(metrics, sums, strict=True))


def metric_names(options: TrainConfig) -> tuple[str, ...]:
    """The metrics of `summed_loss`."""
    return (*METRICS, "kl_reference") if options.kl_coef else METRICS


def k3(other_BT: Tensor, sampled_BT: Tensor) -> Tensor:
    """KL(sampled || other) at tokens drawn from `sampled`: d - log d - 1 with d = other / sampled; never negative.

    Source: J. Schulman, "Approximating KL divergence" (2020), estimator k3.
    """
    log_ratio_BT = (other_BT - sampled_BT).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return torch.expm1(log_ratio_BT) - log_ratio_BT


# ------------------------------------------------------------------------------------------------------------ helpers
@torch.no_grad()
def _metrics(tokens: PolicyTokens, clipped_BT: Tensor, options: TrainConfig) -> dict[str, Tensor]:
    importance_BT = _ratio(tokens.proximal_BT, tokens.behaviour_BT)
    return {
        "ratio": _ratio(tokens.logprobs_BT, tokens.proximal_BT),
        "clip_fraction": clipped_BT.float(),
        "importance_weight": importance_BT,
        "tis_fraction": (importance_BT > options.tis_cap).float(),
        "kl_behaviour": k3(tokens.logprobs_BT, tokens.behaviour_BT),
    }


def _clipped(ratio_BT: Tensor, advantages_BT: Tensor, options: TrainConfig) -> tuple[Tensor, Tensor]:
    free_BT = ratio_BT * advantages_BT
    held_BT = ratio_BT.clamp(1 - options.clip_low, 1 + options.clip_high) * advantages_BT
    return torch.minimum(free_BT, held_BT), held_BT < free_BT


def _ratio(above_BT: Tensor, below_BT: Tensor) -> Tensor:
    return (above_BT - below_BT).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def _sequence_ratio(above_BT: Tensor, below_BT: Tensor, mask_BT: Tensor) -> Tensor:
    num_trained_B1 = mask_BT.sum(-1, keepdim=True).clamp(min=1)
    mean_B1 = (above_BT - below_BT).masked_fill(~mask_BT, 0).sum(-1, keepdim=True) / num_trained_B1
    return mean_B1.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp().expand_as(above_BT)


def _sum(value_BT: Tensor, mask_BT: Tensor) -> Tensor:
    return value_BT.masked_fill(~mask_BT, 0).sum()
