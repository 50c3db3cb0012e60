"""A task of your own: find a hidden number. `my_task.toml` trains on it; this file is all there is to write."""

from __future__ import annotations

import random
import re
from typing import Any


class GuessNumber:
    """Guess a number; each answer says between which numbers the hidden one lies."""

    def __init__(self, high: int = 9) -> None:
        self.high = high

    def reset(self, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        self.hidden = random.Random(seed).randint(1, self.high)
        self.least, self.most = 1, self.high
        return self._range(), {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        guess = re.fullmatch(r"\d+", action.strip())
        if guess is None:
            return "This is no number.", 0.0, True, False, {}
        number = int(guess[0])
        if number == self.hidden:
            return "Right.", 1.0, True, False, {}
        if number < self.hidden:
            self.least = max(self.least, number + 1)
        else:
            self.most = min(self.most, number - 1)
        return self._range(), 0.0, False, False, {}

    def sample_action(self, rng: random.Random) -> str:
        """Optional: a well-formed random action, so that a tiny model can be warmed up."""
        return str(rng.randint(1, self.high))

    def _range(self) -> str:
        return f"{self.least} to {self.most}"
