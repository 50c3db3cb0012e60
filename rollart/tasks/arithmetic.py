"""Chains of sums and differences: one turn, one integer, right or wrong."""

from __future__ import annotations

import random
import re
from typing import Annotated, Any

from msgspec import Meta, Struct

from rollart.tasks import held_out
from rollart.tasks.definition import TaskDefinition

_INTEGER = re.compile(r"-?\d{1,18}")


class ArithmeticOptions(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of task `arithmetic`."""

    num_terms: Annotated[int, Meta(ge=2, le=64, description="Terms in the chain.")] = 2
    max_value: Annotated[int, Meta(ge=1, le=10**9, description="Largest term.")] = 9


class Arithmetic:
    """Reward 1 for the right integer and nothing else in the answer, 0 otherwise."""

    def __init__(self, options: ArithmeticOptions | None = None) -> None:
        self._options = options or ArithmeticOptions()
        self._result = 0

    def reset(self, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        """Draw a chain such as `3 + 5 - 2 =`."""
        text, self._result = held_out.draw(seed, self._draw, lambda drawn: drawn[0])
        return text, {}

    def _draw(self, seed: int | None) -> tuple[str, int]:
        """The text and its result."""
        rng = random.Random(seed)
        result = rng.randint(0, self._options.max_value)
        words = [str(result)]
        for _ in range(self._options.num_terms - 1):
            term, sign = rng.randint(0, self._options.max_value), rng.choice((1, -1))
            result += sign * term
            words += ["+" if sign > 0 else "-", str(term)]
        return " ".join([*words, "="]), result

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Compare the answer; the episode is over."""
        answer = _INTEGER.fullmatch(action.strip())
        right = answer is not None and int(answer[0]) == self._result
        return "", float(right), True, False, {"answer": self._result}

    def sample_action(self, rng: random.Random) -> str:
        """A random integer among the results that such a chain can have."""
        most, terms = self._options.max_value, self._options.num_terms
        return str(rng.randint(-most * (terms - 1), most * terms))


TASK = TaskDefinition(
    name="arithmetic",
    summary="Add and subtract small integers, one turn",
    load="rollart.tasks.arithmetic:Arithmetic",
    options=ArithmeticOptions,
    system_prompt="Answer with one integer.",
    max_turns=1,
    max_turn_tokens=12,
    max_tokens=256,
)
