"""Names of classes and functions that another process can import: `module:name`, or `/path/to/file.py:name`.

Invariant: `named(target_of(kind))` is the same class in every process that sees the same files. What this file leaves
out: entry points of tasks (`tasks/registry.py`).
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from rollart.errors import ConfigError
from rollart.imports import load_object

PREFIX = "rollart_file_"
"""Modules from files get a name of their own, by which their `if __name__ == "__main__"` stays quiet."""


def named(target: str, what: str = "worker target") -> Callable[..., Any]:
    """What a target names. Raises ConfigError, beginning with `what`, when there is no such thing."""
    path, separator, name = target.rpartition(":")
    if separator and path.endswith(".py"):
        target = f"{_load_file(path, what)}:{name}"
    found = load_object(target, what)
    if not callable(found):
        raise ConfigError(f"{what}: {target!r} is a {type(found).__name__}, which cannot be called")
    return cast("Callable[..., Any]", found)


def target_of(kind: type) -> str:
    """The target of a class. Raises ConfigError when another process cannot find it."""
    if "<locals>" in kind.__qualname__:
        raise ConfigError(f"{kind.__qualname__}: a worker's process cannot find a class in a function; move it out")
    if kind.__module__ != "__main__":
        return f"{kind.__module__}:{kind.__qualname__}"
    main = sys.modules["__main__"]
    spec, path = getattr(main, "__spec__", None), getattr(main, "__file__", None)
    if spec is not None:
        return f"{spec.name}:{kind.__qualname__}"
    if path is None or not Path(path).is_file():
        raise ConfigError(f"{kind.__qualname__}: a worker's process cannot import what was typed in; save it to a file")
    return f"{Path(path).resolve()}:{kind.__qualname__}"


def _load_file(path: str, what: str) -> str:
    """Import a file, which finds its neighbours as a script does; the name of its module."""
    name = f"{PREFIX}{Path(path).stem}"
    if name in sys.modules:
        return name
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None or not Path(path).is_file():
        raise ConfigError(f"{what}: {path} is no Python file")
    if (folder := str(Path(path).parent)) not in sys.path:
        sys.path.insert(0, folder)
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise ConfigError(f"{what}: importing {path} failed: {type(error).__name__}: {error}") from error
    return name
