"""Reasoning problems from the generators of `reasoning-gym` (extra `reasoning`), offline: one turn, the library scores.

Invariant: a seed makes a dataset of one item, so episodes do not depend on how many were drawn before.
"""

from __future__ import annotations

import random
from typing import Annotated, Any

from msgspec import Meta, Struct, field

from rollart.config import nearest
from rollart.errors import ConfigError, boundary
from rollart.tasks.definition import TaskDefinition
from rollart.types import HELD_OUT


class ReasoningOptions(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of task `reasoning`."""

    dataset: Annotated[str, Meta(description="A generator of reasoning-gym.")] = "basic_arithmetic"
    dataset_options: Annotated[dict[str, Any], Meta(description="Settings of that generator.")] = field(
        default_factory=dict
    )


class Reasoning:
    """Reward: the generator's own score of the answer, between 0 and 1.

    `sample_action` answers another random item of the generator; generators without a written answer have none.
    """

    def __init__(self, options: ReasoningOptions | None = None) -> None:
        from reasoning_gym.factory import DATASETS

        self._options = options or ReasoningOptions()
        if self._options.dataset not in DATASETS:
            raise ConfigError(
                f"dataset: {self._options.dataset!r} unknown{nearest(self._options.dataset, list(DATASETS))}"
            )
        with boundary(ConfigError, f"dataset_options of {self._options.dataset!r}"):
            self._draw(0)
        if isinstance(self._entry["answer"], str):
            self.sample_action = self._other_answer

    def reset(self, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        """Draw the item of `seed`."""
        self._draw(random.randrange(HELD_OUT) if seed is None else seed)
        return str(self._entry["question"]), {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Score the answer; the episode is over."""
        score = self._dataset.score_answer(answer=action.strip(), entry=self._entry)
        return "", float(score), True, False, {}

    def _draw(self, seed: int) -> None:
        import reasoning_gym

        options = self._options
        self._dataset = reasoning_gym.create_dataset(options.dataset, seed=seed, size=1, **options.dataset_options)
        self._entry: dict[str, Any] = self._dataset[0]

    def _other_answer(self, rng: random.Random) -> str:
        import reasoning_gym

        options = self._options
        seed = rng.randrange(HELD_OUT)
        other = reasoning_gym.create_dataset(options.dataset, seed=seed, size=1, **options.dataset_options)
        return str(other[0]["answer"])


TASK = TaskDefinition(
    name="reasoning",
    summary="One of the 100 problem generators of reasoning-gym, one turn",
    load="rollart.tasks.reasoning:Reasoning",
    options=ReasoningOptions,
    max_turns=1,
    max_turn_tokens=64,
    max_tokens=1024,
    extra="reasoning",
    requires="reasoning_gym",
    try_out=True,
)
