"""A task of your own: find a hidden number. `my_task.toml` trains on it; this file is all there is to write."""

from __future__ import annotations

import random
import re
from typing import Any


class GuessNumber:
    """Guess a number; each answer says whether the hidden one is higher or lower."""

    def __init__(self, high: int = 9) -> None:
        self.high = high

    def reset(self, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        self.hidden = random.Random(seed).randint(1, self.high)
        return f"1 to {self.high}", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        guess = re.search(r"\d+", action)
        if guess is None:
            return "Answer a number.", 0.0, False, False, {}
        if int(guess[0]) == self.hidden:
            return "Right.", 1.0, True, False, {}
        return "higher" if int(guess[0]) < self.hidden else "lower", 0.0, False, False, {}

    def sample_action(self, rng: random.Random) -> str:
        """Optional: a well-formed random action, so that a tiny model can be warmed up."""
        return str(rng.randint(1, self.high))
