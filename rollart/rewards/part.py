"""A reward within a reward: named as in a config, built from its options, called for one number.

Invariant: what comes back is a finite number; every fault is an error that names the part. What this file leaves out:
how numbers are put together (`composite.py`, `group.py`).
"""

from __future__ import annotations

import asyncio
import inspect
import math
import numbers
from collections.abc import Callable
from typing import Any, cast

from msgspec import Struct, convert, field

from rollart.checks import check
from rollart.errors import ConfigError, RewardError, said
from rollart.imports import check_arguments, load_object
from rollart.types import RewardRequest


class Base(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A reward as a config names it: `reward` is `module:function` or `module:Class`, `options` are for a class."""

    reward: str
    options: dict[str, Any] = field(default_factory=dict)


Inner = tuple[str, dict[str, Any], str]
"""A part as `inner_rewards` of a class names it: its reward, its options, and the key of its table."""


def inner(base: Base, key: str) -> Inner:
    """For a class's `inner_rewards`, by which a config is checked for what the parts need."""
    return base.reward, base.options, key


class Part:
    """A reward of one trajectory, ready to be called. Raises ConfigError."""

    def __init__(self, base: Base, key: str) -> None:
        self.name = base.reward
        self._call = build(base, key)

    def __call__(self, request: RewardRequest) -> float:
        """Raises RewardError that names the part."""
        try:
            value = self._call(request)
            if inspect.isawaitable(value):
                value = asyncio.run(_finish(value))
        except Exception as error:
            raise RewardError(f"part {self.name!r}: {type(error).__name__}: {said(error)}") from error
        if not isinstance(value, numbers.Real) or not math.isfinite(value):
            raise RewardError(f"part {self.name!r} returned {value!r:.80}; expected a finite number")
        return float(value)


def checked(base: Base, key: str) -> Callable[..., Any]:
    """What `reward` names, with options that it can take. Raises ConfigError, beginning with `key`."""
    found = load_object(base.reward, f"{key}.reward")
    if not callable(found):
        raise ConfigError(f"{key}.reward: {base.reward!r} is a {type(found).__name__}, which cannot be called")
    check_arguments(found, base.options, f"{key}.options", base.reward)
    if getattr(found, "scope", "trajectory") != "trajectory":
        raise ConfigError(f"{key}.reward: {base.reward!r} scores whole groups, and cannot be part of a reward")
    if check_options := getattr(found, "check_options", None):
        check_options(base.options, f"{key}.options")
    return cast("Callable[..., Any]", found)


def build(base: Base, key: str) -> Callable[[RewardRequest], Any]:
    """The function, or what its class makes of the options. Raises ConfigError, beginning with `key`."""
    found = checked(base, key)
    if not inspect.isclass(found):
        return cast("Callable[[RewardRequest], Any]", found)
    try:
        return cast("Callable[[RewardRequest], Any]", found(**base.options))
    except Exception as error:
        raise ConfigError(f"{key}: {base.reward!r} refuses its options: {said(error)}") from error


def read(kind: type[Struct], data: Any, key: str) -> Any:
    """A table as a Struct. Raises ConfigError that names the key."""
    if not isinstance(data, dict):
        raise ConfigError(f'{key}: expected a table such as {{ reward = "module:name" }}, got {data!r:.80}')
    check(kind, data, f"{key}.")
    if "reward" not in data:
        raise ConfigError(f'{key}.reward: missing; write reward = "module:name"')
    return convert(data, kind)


async def _finish(value: Any) -> Any:
    return await value
