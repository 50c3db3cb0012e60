"""A simulated environment for experiments with schedules: turns, words, latency and faults drawn from a profile.

Latency is a real `time.sleep` inside the environment, which stands for slow ones (browsers, shells, containers).
Invariant: with `per_member = false` an episode, its delays and its faults follow from the seed alone.
"""

from __future__ import annotations

import random
import time
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from rollart.tasks.actions import ActionWords
from rollart.tasks.definition import TaskDefinition

VOCABULARY = ("red", "blue", "green", "black", "white", "grey", "pink", "brown")
HANG_S = 24 * 3600.0

Probability = Annotated[float, Meta(ge=0, le=1)]
Seconds = Annotated[float, Meta(ge=0)]


class SyntheticOptions(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of task `synthetic`. Rates are per call of reset and step."""

    turns_mean: Annotated[float, Meta(ge=1, description="Mean number of turns, before the bounds below.")] = 4.0
    turns_min: Annotated[int, Meta(ge=1, description="At least so many turns.")] = 1
    turns_max: Annotated[int, Meta(ge=1, description="At most so many turns.")] = 8
    words: Annotated[int, Meta(ge=0, description="Filler words in an observation.")] = 8
    reset_latency_s: Annotated[Seconds, Meta(description="Mean delay of a reset.")] = 0.0
    step_latency_s: Annotated[Seconds, Meta(description="Mean delay of a step.")] = 0.0
    latency_tail: Annotated[
        Literal["none", "lognormal", "gaussian"], Meta(description="Distribution of delays around their mean.")
    ] = "none"
    latency_sigma: Annotated[
        float, Meta(ge=0, description="Spread: of the logarithm (lognormal) or relative to the mean (gaussian).")
    ] = 1.0
    failure_rate: Annotated[Probability, Meta(description="Share of calls that raise.")] = 0.0
    hang_rate: Annotated[Probability, Meta(description="Share of calls that do not return.")] = 0.0
    none_rate: Annotated[Probability, Meta(description="Share of calls that return None.")] = 0.0
    per_member: Annotated[
        bool, Meta(description="Draw delays and faults afresh for each episode, not from the seed.")
    ] = False

    def __post_init__(self) -> None:
        if self.turns_min > self.turns_max:
            raise ValueError(f"turns_min {self.turns_min} is more than turns_max {self.turns_max}")


class Synthetic:
    """Says a word and rewards the answer that names it first: 1/turns for each, so 1.0 for a perfect episode."""

    def __init__(self, options: SyntheticOptions | None = None) -> None:
        self._options = options or SyntheticOptions()
        self._words = ActionWords(VOCABULARY)

    def reset(self, seed: int | None = None) -> tuple[str, dict[str, Any]] | None:
        """Draw the number of turns and the first word."""
        options = self._options
        self._rng = random.Random(seed)
        self._weather = random.Random() if options.per_member else random.Random(f"weather {seed}")
        self._num_turns = min(max(_geometric(self._rng, options.turns_mean), options.turns_min), options.turns_max)
        self._turn = 0
        if not self._pass(options.reset_latency_s):
            return None
        return self._observation(), {"turns": self._num_turns}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]] | None:
        """Score the answer and say the next word."""
        self._turn += 1
        if not self._pass(self._options.step_latency_s):
            return None
        reward = float(self._words.find(action) == self._target) / self._num_turns
        return self._observation(), reward, self._turn >= self._num_turns, False, {}

    def sample_action(self, rng: random.Random) -> str:
        """A word, whichever was asked for."""
        return rng.choice(VOCABULARY)

    def _observation(self) -> str:
        self._target = self._rng.randrange(len(VOCABULARY))
        fillers = (self._rng.choice(VOCABULARY) for _ in range(self._options.words))
        return " ".join(["Say", f"{VOCABULARY[self._target]}.", *fillers])

    def _pass(self, mean_s: float) -> bool:
        """Live through one call's weather; False when the call is to return nothing."""
        options, weather = self._options, self._weather
        time.sleep(_delay(weather, mean_s, options.latency_tail, options.latency_sigma))
        if weather.random() < options.hang_rate:
            time.sleep(HANG_S)
        if weather.random() < options.failure_rate:
            raise RuntimeError("simulated failure")
        return weather.random() >= options.none_rate


def _geometric(rng: random.Random, mean: float) -> int:
    turns = 1
    while rng.random() >= 1 / mean:
        turns += 1
    return turns


def _delay(rng: random.Random, mean_s: float, tail: str, sigma: float) -> float:
    """Seconds; both tails keep the mean (the gaussian up to its cut at zero)."""
    if tail == "lognormal":
        return mean_s * rng.lognormvariate(-(sigma**2) / 2, sigma)
    if tail == "gaussian":
        return mean_s * max(0.0, rng.gauss(1.0, sigma))
    return mean_s


TASK = TaskDefinition(
    name="synthetic",
    summary="Repeat a word; latency, length and faults from a profile, for experiments",
    load="rollart.tasks.synthetic:Synthetic",
    options=SyntheticOptions,
    max_turns=8,
    max_turn_tokens=8,
    max_tokens=1024,
)
