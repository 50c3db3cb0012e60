"""Rewards that see all trajectories of a group (`reward_scope = "group"`): rank, and length relative to the group.

Invariant: one number per trajectory, in their order, and none depends on that order. What this file leaves out: who
waits for the group to be complete.
"""

from __future__ import annotations

from typing import Any

from rollart.rewards.part import Base, Inner, Part, checked, inner, read
from rollart.types import RewardRequest


class Rank:
    """The rank of each member's base reward within the group: 0 for the lowest, 1 for the highest, ties averaged.

    r_i = (|{j : v_j < v_i}| + |{j != i : v_j = v_i}| / 2) / (n - 1), and 1/2 for a group of one. It keeps the order of
    a base reward whose scale means little, such as a judge's.
    """

    scope = "group"

    @staticmethod
    def check_options(options: dict[str, Any], key: str) -> None:
        """Raises ConfigError."""
        checked(read(Base, options["base"], f"{key}.base"), f"{key}.base")

    @staticmethod
    def inner_rewards(options: dict[str, Any], key: str) -> list[Inner]:
        """The reward that it calls. Raises ConfigError."""
        return [inner(read(Base, options["base"], f"{key}.base"), f"{key}.base")]

    def __init__(self, *, base: dict[str, Any]) -> None:
        self._base = _base(base)

    def __call__(self, requests: list[RewardRequest]) -> list[float]:
        """Raises RewardError."""
        values = [self._base(request) for request in requests]
        return [_rank(value, values) for value in values]


class Length:
    """Base reward plus `weight` times a reward for being short among the members of the group.

    With l = 1/2 - (length_i - min) / (max - min): l where the base reward is at least `correct`, else min(0, l); 0
    where all are equally long. Length is counted in characters of the responses; Kimi k1.5 (arXiv 2501.12599), whose
    length penalty this is, counts tokens.
    """

    scope = "group"
    check_options = staticmethod(Rank.check_options)
    inner_rewards = staticmethod(Rank.inner_rewards)

    def __init__(self, *, base: dict[str, Any], weight: float = 0.5, correct: float = 1.0) -> None:
        self._base = _base(base)
        self._weight = weight
        self._correct = correct

    def __call__(self, requests: list[RewardRequest]) -> list[float]:
        """Raises RewardError."""
        lengths = [sum(map(len, request.responses)) for request in requests]
        low, span = min(lengths), max(lengths) - min(lengths)
        values = [self._base(request) for request in requests]
        return [
            value + self._weight * self._short((length - low) / span if span else 0.5, value)
            for value, length in zip(values, lengths, strict=True)
        ]

    def _short(self, share: float, value: float) -> float:
        reward = 0.5 - share
        return reward if value >= self._correct else min(0.0, reward)


def _base(table: dict[str, Any]) -> Part:
    return Part(read(Base, table, "reward_options.base"), "reward_options.base")


def _rank(value: float, values: list[float]) -> float:
    if len(values) == 1:
        return 0.5
    below, equal = sum(other < value for other in values), sum(other == value for other in values)
    return (below + (equal - 1) / 2) / (len(values) - 1)
