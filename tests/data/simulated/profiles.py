"""Task profiles for tests."""

from __future__ import annotations

from typing import Any

from rollart.data.simulated.profile import Spread, TaskProfile

LONG = Spread(15.0, "lognormal", 0.5, high=29.0)


def profile(**changes: Any) -> TaskProfile:
    """Four turns of 7 + 3 tokens after a prompt of 11, resets of 5 s and steps of 2 s, but for `changes`."""
    values = {
        "turns": Spread(4.0),
        "prompt_tokens": Spread(11.0),
        "observation_tokens": Spread(7.0),
        "response_tokens": Spread(3.0),
        "reset_s": Spread(5.0),
        "step_s": Spread(2.0),
    }
    return TaskProfile(**{**values, **changes})
