"""A weighted sum of rewards, some of which are gates.

Invariant: parts are called in their order; after a gate that is shut no further part is called. What this file leaves
out: how a part is found and called (`part.py`).
"""

from __future__ import annotations

from typing import Any

from rollart.errors import ConfigError
from rollart.rewards.part import Base, Inner, Part, checked, inner, read
from rollart.types import RewardRequest


class CompositePart(Base, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One entry of `parts`. A gate counts by its weight like any other part; weight 0 makes it a gate and no more."""

    weight: float = 1.0
    gate: bool = False
    """Shut, which makes the whole reward 0, where its value is 0 or less, or below `threshold`."""
    threshold: float | None = None
    """Of a gate: the smallest value that opens it."""
    name: str = ""
    """In errors; default: `reward`."""


class Composite:
    """sum of weight x value over `parts`, or 0 when a gate is shut. `parts`: tables of `CompositePart`'s keys.

    Raises ConfigError for parts that cannot be built.
    """

    scope = "trajectory"

    @staticmethod
    def check_options(options: dict[str, Any], key: str) -> None:
        """Raises ConfigError."""
        for part, where in _read(options["parts"], f"{key}.parts"):
            checked(part, where)

    @staticmethod
    def inner_rewards(options: dict[str, Any], key: str) -> list[Inner]:
        """The rewards that it calls. Raises ConfigError."""
        return [inner(part, where) for part, where in _read(options["parts"], f"{key}.parts")]

    def __init__(self, *, parts: list[dict[str, Any]]) -> None:
        self._parts = [(part, _call(part, key)) for part, key in _read(parts, "reward_options.parts")]

    def __call__(self, request: RewardRequest) -> float:
        """The reward of one trajectory. Raises RewardError that names the part at fault."""
        total = 0.0
        for part, call in self._parts:
            value = call(request)
            if part.gate and not _is_open(part, value):
                return 0.0
            total += part.weight * value
        return total


def _read(parts: list[dict[str, Any]], key: str) -> list[tuple[CompositePart, str]]:
    """The parts, each with its key. Raises ConfigError."""
    if not isinstance(parts, list) or not parts:
        raise ConfigError(f'{key}: expected a list such as [{{ reward = "module:name" }}]')
    return [(_part(table, f"{key}[{index}]"), f"{key}[{index}]") for index, table in enumerate(parts)]


def _part(table: dict[str, Any], key: str) -> CompositePart:
    part: CompositePart = read(CompositePart, table, key)
    if part.threshold is not None and not part.gate:
        raise ConfigError(f"{key}.threshold: only a gate has one; add gate = true")
    return part


def _call(part: CompositePart, key: str) -> Part:
    call = Part(part, key)
    call.name = part.name or part.reward
    return call


def _is_open(part: CompositePart, value: float) -> bool:
    return value > 0 if part.threshold is None else value >= part.threshold
