"""Sorting numbers: one turn, a long answer, partial credit by a reward function (`rollart.rewards.rule`)."""

from __future__ import annotations

import random
from typing import Annotated, Any

from msgspec import Meta, Struct

from rollart.tasks import held_out
from rollart.tasks.definition import TaskDefinition


class SortingOptions(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of task `sorting`."""

    length: Annotated[int, Meta(ge=1, le=256, description="How many numbers.")] = 6
    low: Annotated[int, Meta(description="Smallest number.")] = 0
    high: Annotated[int, Meta(description="Largest number.")] = 9

    def __post_init__(self) -> None:
        if self.low > self.high:
            raise ValueError(f"low {self.low} is more than high {self.high}")


class Sorting:
    """Reward 0 at the step: the reward function scores the answer."""

    def __init__(self, options: SortingOptions | None = None) -> None:
        self._options = options or SortingOptions()

    def reset(self, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        """Draw the numbers."""
        return f"Sort: {held_out.draw(seed, lambda each: self._draw(random.Random(each)))}", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Whatever the answer, the episode is over."""
        del action
        return "", 0.0, True, False, {}

    def sample_action(self, rng: random.Random) -> str:
        """As many random numbers, in any order."""
        return self._draw(rng)

    def _draw(self, rng: random.Random) -> str:
        options = self._options
        return " ".join(str(rng.randint(options.low, options.high)) for _ in range(options.length))


TASK = TaskDefinition(
    name="sorting",
    summary="Sort a few numbers, one turn with a long answer",
    load="rollart.tasks.sorting:Sorting",
    options=SortingOptions,
    system_prompt="Write the numbers in ascending order.",
    max_turns=1,
    max_turn_tokens=32,
    max_tokens=256,
    reward="rollart.rewards.rule:sorting",
)
