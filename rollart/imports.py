"""Objects named `module:attribute` in a config. The current folder is importable, behind everything installed."""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

from rollart.checks import nearest
from rollart.errors import ConfigError


def load_object(path: str, key: str) -> Any:
    """The object at `module:attribute`. Raises ConfigError, beginning with `key`, with the cause."""
    module_name, separator, attribute = path.partition(":")
    if not separator or not module_name or not attribute:
        raise ConfigError(f"{key}: {path!r} is not of the form module:name")
    value = _load_module(module_name, key)
    for part in attribute.split("."):
        if not hasattr(value, part):
            public = [name for name in dir(value) if not name.startswith("_")]
            where = getattr(value, "__file__", None) or module_name
            raise ConfigError(f"{key}: {where} has no {part!r}{nearest(part, public)}")
        value = getattr(value, part)
    return value


def _load_module(name: str, key: str) -> Any:
    folder = os.getcwd()
    if folder not in sys.path:
        sys.path.append(folder)
    importlib.invalidate_caches()
    try:
        return importlib.import_module(name)
    except KeyboardInterrupt:
        raise
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(f"{error.name}.")):
            raise ConfigError(f"{key}: no module {name!r} among the installed packages or in {folder}") from error
        raise ConfigError(f"{key}: importing {name!r} failed: {error}") from error
    except BaseException as error:  # a module may do anything, sys.exit included
        raise ConfigError(f"{key}: importing {name!r} failed: {type(error).__name__}: {error}") from error
