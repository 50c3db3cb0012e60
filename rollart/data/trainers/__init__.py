"""Trainers by name, imported only when asked for. What this file leaves out: any trainer."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping

from rollart.config import Config, nearest
from rollart.errors import ConfigError, to_install
from rollart.protocols import Trainer

TrainerFactory = Callable[..., Trainer]
"""Called as `factory(model_folder, options, temperature, seed, device)`; of several ranks, with `ranks` at the end."""


def _embedded() -> TrainerFactory:
    from rollart.data.trainers.embedded import EmbeddedTrainer

    return EmbeddedTrainer


def _fsdp2() -> TrainerFactory:
    from rollart.data.trainers.fsdp import FsdpTrainer

    return FsdpTrainer


def _megatron() -> TrainerFactory:
    _check_there("trainer: 'megatron'", "megatron.core", "megatron")
    from rollart.data.trainers.megatron.trainer import MegatronTrainer

    return MegatronTrainer


TRAINERS: Mapping[str, Callable[[], TrainerFactory]] = {
    "embedded": _embedded,
    "fsdp2": _fsdp2,
    "megatron": _megatron,
}
"""What `trainer` in the configuration chooses from: name -> loader."""


def trainer_factory(name: str) -> TrainerFactory:
    """The trainer called `name`. Raises ConfigError for an unknown one."""
    check_known(name)
    return TRAINERS[name]()


def check_known(name: str) -> None:
    """Raises ConfigError for a trainer that is not here."""
    if name not in TRAINERS:
        raise ConfigError(f"trainer: unknown {name!r}{nearest(name, list(TRAINERS))}")


def check_installed(config: Config) -> None:
    """Whether the trainer, and the packages that it needs, are here. Raises ConfigError, which names the extra."""
    check_known(config.trainer)
    if config.train.lora.r:
        _check_there("train.lora:", "peft", "peft")
    if config.trainer == "megatron":
        _check_there("trainer: 'megatron'", "megatron.core", "megatron")


def _check_there(key: str, module: str, extra: str) -> None:
    try:
        there = importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        there = False
    if not there:
        raise ConfigError(f"{key} needs an extra; {to_install(extra)}")
