"""Random but well-formed play, as token sequences for the supervised phase before reinforcement learning.

It plays the part of pre-training for a tiny model: the form of an action and of an observation is learned, not which
action is good. Invariant: only training seeds (below HELD_OUT), the same tokens that a rollout would hold, and nothing
drawn from a task's reward. What this file leaves out: the training itself.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Protocol, TypeVar

from msgspec import Struct

from rollart.errors import ConfigError, EnvError, EnvTimeout, boundary
from rollart.protocols import Env, Renderer, SupportsWarmup
from rollart.tasks.hosted import HostedEnv
from rollart.types import HELD_OUT, EnvReply, TaskSpec

T = TypeVar("T")
Factory = Callable[[], Env]


class WarmupRenderer(Renderer, Protocol):
    """A renderer that also turns an action's text into tokens."""

    def encode(self, text: str) -> list[int]: ...


class WarmupSequence(Struct, frozen=True):
    """One episode: token ids and the weight of each in the loss."""

    tokens: list[int]
    weights: list[float]


def left_out(tasks: Mapping[str, tuple[TaskSpec, Factory]]) -> list[str]:
    """Names of the tasks whose environment has no `sample_action`. Raises EnvError when one cannot be built."""
    return [name for name, (_, make) in tasks.items() if not _can_sample(name, make)]


def episodes(
    tasks: Mapping[str, tuple[TaskSpec, Factory]],
    renderer: WarmupRenderer,
    num_episodes: int,
    seed: int,
    observation_weight: float = 0.3,
) -> Iterator[WarmupSequence]:
    """Play `num_episodes`, drawing tasks by their weight. Tasks of `left_out` are not played.

    Weights: 1.0 on action tokens and their stop token, `observation_weight` on the observations after the first prompt,
    0.0 on the first prompt. A failed episode is replaced by another one; EnvError when as many failed as were asked
    for. ConfigError when no task can be played.
    """
    skipped = set(left_out(tasks))
    playable = [pair for name, pair in tasks.items() if name not in skipped and pair[0].weight > 0]
    if not playable:
        raise ConfigError("model.warmup_steps: no task of the mixture has a sample_action; set warmup_steps = 0")
    return _episodes(playable, renderer, num_episodes, random.Random(seed), observation_weight)


def _can_sample(name: str, make: Factory) -> bool:
    with boundary(EnvError, f"constructor of task {name!r}"):
        env = make()
        if hasattr(env, "close"):
            env.close()
    return isinstance(env, SupportsWarmup)


def _episodes(
    playable: Sequence[tuple[TaskSpec, Factory]],
    renderer: WarmupRenderer,
    num_episodes: int,
    rng: random.Random,
    observation_weight: float,
) -> Iterator[WarmupSequence]:
    players = [_Player(spec, make) for spec, make in playable]
    played = failed = 0
    try:
        while played < num_episodes:
            player = rng.choices(players, [player.spec.weight for player in players])[0]
            try:
                sequence = _play(player, renderer, rng, observation_weight)
            except EnvError as error:
                player.renew()
                failed += 1
                if failed >= num_episodes:
                    raise EnvError(f"warm-up: {failed} episodes failed; the last one: {error}") from error
                continue
            played += 1
            yield sequence
    finally:
        for player in players:
            player.env.retire()


def _play(player: _Player, renderer: WarmupRenderer, rng: random.Random, observation_weight: float) -> WarmupSequence:
    spec = player.spec
    reply = player.reset(rng.randrange(HELD_OUT))
    tokens = renderer.first(spec.system_prompt, reply.observation)
    weights = [0.0] * len(tokens)
    for turn in range(spec.max_turns):
        text = player.sample_action(rng)
        action = [*renderer.encode(text), renderer.stop_token_ids[0]][: spec.max_turn_tokens]
        tokens += action
        weights += [1.0] * len(action)
        reply = player.step(text)
        if reply.terminated or reply.truncated or turn + 1 == spec.max_turns or len(tokens) >= spec.max_tokens:
            break
        observation = renderer.following(reply.observation, action)
        tokens += observation
        weights += [observation_weight] * len(observation)
    return WarmupSequence(tokens[: spec.max_tokens], weights[: spec.max_tokens])


class _Player:
    """Waits for a hosted environment, so that a hung one costs an episode."""

    def __init__(self, spec: TaskSpec, make: Factory) -> None:
        self.spec = spec
        self._make = make
        self.env = HostedEnv(spec.name, make)

    def renew(self) -> None:
        """Go on with a fresh environment."""
        self.env.retire()
        self.env = HostedEnv(self.spec.name, self._make)

    def reset(self, seed: int) -> EnvReply:
        return _wait(self.env.reset(seed), self.spec.reset_timeout_s, f"reset of task {self.spec.name!r}")

    def step(self, action: str) -> EnvReply:
        return _wait(self.env.step(action), self.spec.step_timeout_s, f"step of task {self.spec.name!r}")

    def sample_action(self, rng: random.Random) -> str:
        what = f"sample_action of task {self.spec.name!r}"
        return _wait(self.env.sample_action(rng), self.spec.step_timeout_s, what)


def _wait(future: Future[T], timeout_s: float, what: str) -> T:
    try:
        return future.result(timeout_s)
    except EnvError:
        raise
    except TimeoutError as error:
        raise EnvTimeout(f"{what} did not answer within {timeout_s:g} s") from error
