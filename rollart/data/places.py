"""The files and folders that a config names: whether they are there, or can be made.

Invariant: looking makes nothing, fetches nothing and runs nothing; what is refused here would end the run later. What
this file leaves out: modules (`imports.py`), and what only a simulation reads (`simulator.check`).
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from rollart.config import Config
from rollart.errors import ConfigError
from rollart.resource.store import folder_of

TINY = "tiny"
HUB_NAME = re.compile(r"[\w][\w.-]*(/[\w][\w.-]*)?", re.ASCII)


def check_places(config: Config) -> None:
    """Every file and folder that a run needs or makes. Raises ConfigError that begins with the key."""
    model_place(config.model.name)
    check_makeable("log.folder", Path(config.log.folder))
    if (store := folder_of(config.resources.store)) is not None:
        check_makeable("resources.store", store)
    weights = config.engine_options.get("weights_folder") if config.engine == "http" else None
    if isinstance(weights, str) and config.runtime != "ray" and not Path(weights).is_dir():
        raise ConfigError(
            f"engine_options.weights_folder: no folder {weights!r}; make it, where the servers see it under this name"
        )
    for name, task in config.tasks.items():
        verdicts = task.reward_options.get("cache") if task.reward == "judge" else None
        if isinstance(verdicts, str) and verdicts:
            check_makeable(f"tasks.{name}.reward_options.cache", Path(verdicts))


def model_place(name: str) -> Path | None:
    """The folder of a model; None where `name` is `tiny`, which is made, or one on the hub. Raises ConfigError."""
    folder = Path(name).expanduser()
    if name == TINY:
        return None
    if name and folder.is_dir():
        for needed in ("config.json", "tokenizer.json"):
            if not (folder / needed).is_file():
                raise ConfigError(f"model.name: {folder} has no {needed}; give a folder in Hugging Face format")
        return folder.resolve()
    if name and folder.exists():
        raise ConfigError(f"model.name: {name!r} is a file; give the folder around it, in Hugging Face format")
    if not HUB_NAME.fullmatch(name):
        raise ConfigError(f"model.name: no folder {name!r}; give 'tiny', a folder in Hugging Face format or a hub name")
    return None


def model_said(name: str) -> str:
    """Where a model will come from, for people. Raises ConfigError."""
    folder = model_place(name)
    if folder is not None:
        return f"{folder}"
    if name == TINY:
        return "tiny, made on first use"
    return f"{name}: no folder here, so it is fetched from the Hugging Face hub, unless its cache has it"


def check_makeable(key: str, folder: Path) -> None:
    """Whether a folder is there and may be written, or may be made. Raises ConfigError."""
    folder = folder.expanduser()
    there = folder if folder.exists() else next(each for each in folder.absolute().parents if each.exists())
    if not there.is_dir():
        raise ConfigError(f"{key}: {there} is a file, so that {folder} cannot be a folder; name another")
    if not os.access(there, os.W_OK | os.X_OK):
        what = "may not be written" if there == folder else f"cannot be made: {there} may not be written"
        raise ConfigError(f"{key}: {folder} {what}; name another folder, or change its permissions")
