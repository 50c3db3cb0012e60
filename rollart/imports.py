"""Objects named `module:attribute` in a config, and the options that build them.

The current folder is importable, behind everything installed.
"""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from collections.abc import Callable, Mapping
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


def check_arguments(function: Callable[..., Any], options: Mapping[str, Any], key: str, shown: str) -> None:
    """Can the class be built with these options? Names only: it is built where it runs. Raises ConfigError."""
    if not isinstance(function, type):
        if options:
            raise ConfigError(f"{key}: {shown!r} is a plain function, which takes none; write a class")
        return
    try:
        signature = inspect.signature(function)
    except ValueError:  # a class of C code may have none
        return
    takes_any = any(each.kind is each.VAR_KEYWORD for each in signature.parameters.values())
    for option in () if takes_any else options:
        if option not in signature.parameters:
            raise ConfigError(f"{key}.{option}: unknown option{nearest(option, [*signature.parameters])}")
    try:
        signature.bind(**options)
    except TypeError as error:
        raise ConfigError(f"{key}: {shown!r}: {error}") from error


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
