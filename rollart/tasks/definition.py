"""A task family as a value: what it is called, how it is built, and the defaults that a config may override.

Built-in families keep their definition beside their environment; a package may publish its own through the entry point
group `rollart.tasks`. What this file leaves out: finding a definition (`registry.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from msgspec import Struct

from rollart.protocols import Env


class NoOptions(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A task without options."""


class TaskDefinition(Struct, frozen=True, kw_only=True):
    """One family of tasks.

    `load`: `module:Class` (imported on first use) or a callable; called with an instance of `options`, it makes an
    environment. `options`: a msgspec Struct that forbids unknown fields; the description of a field is its help text.
    `reward`: `module:function`, or empty where the sum of step rewards is the reward. `extra` is the pip extra and
    `requires` the module that must be importable. `try_out`: build one environment when the config is checked, because
    only the library behind it can say whether the options make sense.
    """

    name: str
    summary: str
    load: str | Callable[[Any], Env]
    options: type[Struct] = NoOptions
    system_prompt: str = ""
    max_turns: int = 16
    max_turn_tokens: int = 64
    max_tokens: int = 1024
    success_reward: float = 1.0
    reward: str = ""
    extra: str = ""
    requires: str = ""
    try_out: bool = False
