"""Trainers by name, imported only when asked for. What this file leaves out: any trainer."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from rollart.config import nearest
from rollart.errors import ConfigError
from rollart.protocols import Trainer

TrainerFactory = Callable[..., Trainer]
"""Called as `factory(model_folder, options, temperature, seed, device)`."""


def _embedded() -> TrainerFactory:
    from rollart.data.trainers.embedded import EmbeddedTrainer

    return EmbeddedTrainer


TRAINERS: Mapping[str, Callable[[], TrainerFactory]] = {"embedded": _embedded}
"""What `trainer` in the configuration chooses from: name -> loader."""


def trainer_factory(name: str) -> TrainerFactory:
    """The trainer called `name`. Raises ConfigError for an unknown one."""
    if name not in TRAINERS:
        raise ConfigError(f"trainer: unknown {name!r}{nearest(name, list(TRAINERS))}")
    return TRAINERS[name]()
