"""Advantages from rewards: how much better each member did than what it is compared with. Pure Python.

Invariant: the output has the shape of the input, one list per group and one number per member, and every number is
finite. What this file leaves out: credit within a trajectory (every trained token gets its trajectory's advantage).

>>> ADVANTAGES["rloo"]([[1.0, 0.0, 0.0]])
[[1.0, -0.5, -0.5]]
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from rollart.config import nearest
from rollart.errors import ConfigError, RewardError, TrainError

Rewards = Sequence[Sequence[float]]
"""Rewards per group, then per member."""

EPSILON = 1e-6
"""Added to a standard deviation, so that a group whose rewards are all equal gets zeros."""


def grpo(rewards: Rewards) -> list[list[float]]:
    """Group-relative: A_i = (r_i - mean(r)) / (std(r) + eps), population std, mean and std over the group.

    Source: GRPO, DeepSeekMath (arXiv 2402.03300), section 4.1, outcome supervision.
    """
    return [_normalised(group, group) for group in rewards]


def rloo(rewards: Rewards) -> list[list[float]]:
    """Leave one out: A_i = r_i - mean of the other members' rewards = (n r_i - sum(r)) / (n - 1).

    Source: RLOO (arXiv 2402.14740), section 4. Raises TrainError for a group of one.
    """
    return [_left_out(group) for group in rewards]


def reinforce_pp(rewards: Rewards) -> list[list[float]]:
    """Normalised over the batch: A_i = (r_i - mean(R)) / (std(R) + eps), population std, R all rewards of the batch.

    Source: REINFORCE++ (arXiv 2501.03262), section 3, global advantage normalisation; its per-token KL is the
    `kl_coef` of the loss.
    """
    everyone = [reward for group in rewards for reward in group]
    return [_normalised(group, everyone) for group in rewards]


Advantage = Callable[[Rewards], list[list[float]]]
ADVANTAGES: Mapping[str, Advantage] = {"grpo": grpo, "rloo": rloo, "reinforce_pp": reinforce_pp}
"""What `train.advantage` chooses from."""


def advantages(name: str, rewards: Rewards) -> list[list[float]]:
    """Apply the estimator called `name`.

    Raises ConfigError for an unknown name, RewardError for a reward that is not finite.
    """
    if name not in ADVANTAGES:
        raise ConfigError(f"train.advantage: unknown {name!r}{nearest(name, list(ADVANTAGES))}")
    _check_finite(rewards)
    return ADVANTAGES[name](rewards)


def _check_finite(rewards: Rewards) -> None:
    for index, group in enumerate(rewards):
        for member, reward in enumerate(group):
            if not math.isfinite(reward):
                raise RewardError(
                    f"reward of member {member} of group {index} is {reward}: rewards must be finite numbers; "
                    "correct the reward function"
                )


def _normalised(group: Sequence[float], against: Sequence[float]) -> list[float]:
    mean = _mean(against)
    deviation = math.sqrt(_mean([(reward - mean) ** 2 for reward in against]))
    return [(reward - mean) / (deviation + EPSILON) for reward in group]


def _left_out(group: Sequence[float]) -> list[float]:
    size, total = len(group), math.fsum(group)
    if size == 1:
        raise TrainError("advantage 'rloo' compares members of a group, but a group has only one; take 'reinforce_pp'")
    return [(size * reward - total) / (size - 1) for reward in group]


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else 0.0
