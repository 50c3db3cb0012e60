"""What one trajectory meets, drawn before it begins: its turns, their tokens and seconds, and its failures. PURE.

Invariant: an episode is a function of (profile, seed, key) alone, whatever else happens in a run, so that two schedules
or two pool mixes are compared on the same draws (common random numbers). Distributions take one random number per draw
and lengths are drawn before seconds of steps, so that another tail of latency leaves turns and tokens as they were.
What this file leaves out: limits on turns and tokens, which the control plane applies.
"""

from __future__ import annotations

import math
import random

from msgspec import Struct

from rollart.data.simulated.profile import NORMAL, SMALLEST, Spread, TaskProfile


class Episode(Struct):
    """One entry per turn: tokens of the observation before it, tokens of the answer, seconds of the step after it.

    `failing_step`: the turn whose step fails, or -1. `reward`: what the environment pays in all.
    """

    prompts: list[int]
    responses: list[int]
    steps_s: list[float]
    reset_s: float = 0.0
    reset_fails: bool = False
    failing_step: int = -1
    reward: float = 0.0


def draw_episode(profile: TaskProfile, seed: int, key: str) -> Episode:
    """The episode of one member (`key`: the id of its environment) of the group of `seed`."""
    rng = random.Random(f"{seed}/{key}")
    num_turns = _num_turns(profile, seed, rng)
    reset_fails = rng.random() < profile.reset_failure_rate
    reset_s = (profile.reset_failure_s if reset_fails else profile.reset_s).draw(rng)
    reward = rng.random()
    return Episode(
        prompts=[*_tokens(profile.prompt_tokens, rng, 1), *_tokens(profile.observation_tokens, rng, num_turns - 1)],
        responses=_tokens(profile.response_tokens, rng, num_turns),
        steps_s=profile.step_s.draws(rng, num_turns),
        reset_s=reset_s,
        reset_fails=reset_fails,
        failing_step=_failing_step(profile.step_failure_rate, rng, num_turns),
        reward=0.0 if has_equal_rewards(profile, seed) else reward,
    )


def has_equal_rewards(profile: TaskProfile, seed: int) -> bool:
    """Whether all members of the group of `seed` get the same reward."""
    return profile.equal_rewards > 0 and random.Random(f"rewards of {seed}").random() < profile.equal_rewards


def _num_turns(profile: TaskProfile, seed: int, rng: random.Random) -> int:
    share = rng.random()
    if profile.turns_shared:
        share = _correlated(share, random.Random(f"turns of {seed}").random(), profile.turns_shared)
    turns = profile.turns.at(share)
    if profile.difficulty_sigma:
        factor = Spread(1.0, "lognormal", profile.difficulty_sigma)
        turns = profile.turns.within(turns * factor.draw(random.Random(f"difficulty of {seed}")))
    return int(turns + 0.5) or 1


def _correlated(own: float, shared: float, correlation: float) -> float:
    """A share that has `correlation` with the others drawn with `shared` (a one-factor Gaussian copula)."""
    normal = NORMAL.inv_cdf
    mixed = math.sqrt(correlation) * normal(shared or SMALLEST) + math.sqrt(1 - correlation) * normal(own or SMALLEST)
    return NORMAL.cdf(mixed)


def _tokens(spread: Spread, rng: random.Random, count: int) -> list[int]:
    return [int(value + 0.5) or 1 for value in spread.draws(rng, count)]


def _failing_step(rate: float, rng: random.Random, num_turns: int) -> int:
    return next((turn for turn in range(num_turns) if rng.random() < rate), -1) if rate else -1
