"""Environments of other libraries as ours: any Gymnasium environment with discrete or text actions, and GEM's.

What this file leaves out: rendering of pictures and arrays beyond `str()`, and libraries with a server of their own.
"""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

from msgspec import Meta, Struct, field

from rollart.config import nearest
from rollart.errors import ConfigError, boundary
from rollart.protocols import Env
from rollart.tasks.actions import INVALID, ActionWords
from rollart.tasks.definition import TaskDefinition


class GymnasiumOptions(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of task `gymnasium`."""

    id: Annotated[str, Meta(description="Gymnasium's id, for example Taxi-v4.")]
    kwargs: Annotated[dict[str, Any], Meta(description="Passed to gymnasium.make.")] = field(default_factory=dict)
    actions: Annotated[list[str], Meta(description="Names of the discrete actions; default: their numbers.")] = field(
        default_factory=list
    )


class GymnasiumText:
    """A Gymnasium environment whose action is a name found in the text (Discrete) or the text itself (Text).

    Observations are their `str()`. A text without an action changes nothing and costs a turn.
    """

    def __init__(self, options: GymnasiumOptions) -> None:
        import gymnasium

        if options.id not in gymnasium.registry and ":" not in options.id:
            raise ConfigError(f"id: {options.id!r} unknown{nearest(options.id, list(gymnasium.registry))}")
        with boundary(ConfigError, f"id: gymnasium.make({options.id!r})"):
            self._env = gymnasium.make(options.id, disable_env_checker=True, **options.kwargs)
        self._space: Any = self._env.action_space
        self._names = _action_names(self._space, options)
        self._observation = ""

    def reset(self, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        """Begin the episode of `seed`."""
        observation, info = self._env.reset(seed=seed)
        self._observation = str(observation)
        return self._observation, info

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Take the action that the text names."""
        choice = self._parse(action)
        if choice is None:
            return f"{INVALID}\n{self._observation}", 0.0, False, False, {"invalid": True}
        observation, reward, terminated, truncated, info = self._env.step(choice)
        self._observation = str(observation)
        return self._observation, float(reward), bool(terminated), bool(truncated), info

    def sample_action(self, rng: random.Random) -> str:
        """A name of a discrete action, or a sample of the text space."""
        if self._names is not None:
            return rng.choice(self._names.words)
        self._space.seed(rng.randrange(2**31))
        return str(self._space.sample())

    def close(self) -> None:
        """Release what the environment holds."""
        self._env.close()

    def _parse(self, text: str) -> Any:
        if self._names is None:
            return text if self._space.contains(text) else None
        index = self._names.find(text)
        return None if index is None else self._space.start + index


def _action_names(space: Any, options: GymnasiumOptions) -> ActionWords | None:
    """Names for a Discrete space, None for a Text space. Raises ConfigError for any other."""
    from gymnasium import spaces

    if isinstance(space, spaces.Text):
        return None
    if not isinstance(space, spaces.Discrete):
        raise ConfigError(
            f"id: {options.id!r} has actions {space}; only Discrete and Text are text; write an Env class around it"
        )
    numbers = [str(number) for number in range(space.start, space.start + space.n)]
    names = options.actions or numbers
    if len(names) != space.n:
        raise ConfigError(f"actions: {len(names)} names given, but {options.id!r} has {space.n} actions")
    return ActionWords(names)


class GemOptions(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of task `gem`."""

    id: Annotated[str, Meta(description="GEM's id, for example game:GuessTheNumber-v0-easy.")]
    kwargs: Annotated[dict[str, Any], Meta(description="Passed to gem.make.")] = field(default_factory=dict)


class GemText:
    """A GEM environment: the calling convention is ours, only its randomness needs care.

    GEM seeds and draws from Python's global generator, so resets take turns in a process. Games that draw during a step
    (2048) repeat their start, not their course.
    """

    _seeding = threading.Lock()

    def __init__(self, options: GemOptions) -> None:
        with _untouched_logging():
            import gem
            from gem.envs.registration import ENV_REGISTRY
        if options.id not in ENV_REGISTRY:
            raise ConfigError(f"id: {options.id!r} unknown{nearest(options.id, list(ENV_REGISTRY))}")
        with boundary(ConfigError, f"id: gem.make({options.id!r})"):
            self._env = gem.make(options.id, **options.kwargs)
        if type(self._env).sample_random_action is not gem.Env.sample_random_action:
            self.sample_action = self._random_action

    def reset(self, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        """Begin the episode of `seed` (below 2**32)."""
        with self._seeding:
            observation, info = self._env.reset(seed=seed)
        return observation, info

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """As GEM answers."""
        observation, reward, terminated, truncated, info = self._env.step(action)
        return observation, float(reward), terminated, truncated, info

    def _random_action(self, rng: random.Random) -> str:
        with self._seeding:
            random.seed(rng.random())
            return str(self._env.sample_random_action())


@contextmanager
def _untouched_logging() -> Iterator[None]:
    """GEM configures the root logger when imported; put it back as it was."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    try:
        yield
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)


def gymnasium_text(id: str, actions: list[str] | None = None, **kwargs: Any) -> Env:
    """Wrap a Gymnasium environment by its id.

    >>> env = gymnasium_text("CliffWalking-v1", ["up", "right", "down", "left"])
    >>> env.reset(seed=1)[0]
    '36'
    """
    return GymnasiumText(GymnasiumOptions(id=id, actions=actions or [], kwargs=kwargs))


GYMNASIUM = TaskDefinition(
    name="gymnasium",
    summary="Any Gymnasium environment with discrete or text actions",
    load="rollart.tasks.adapters:GymnasiumText",
    options=GymnasiumOptions,
    max_turns=32,
    try_out=True,
)
GEM = TaskDefinition(
    name="gem",
    summary="Any environment of GEM, by its id",
    load="rollart.tasks.adapters:GemText",
    options=GemOptions,
    max_turn_tokens=128,
    extra="gem",
    requires="gem",
    try_out=True,
)
