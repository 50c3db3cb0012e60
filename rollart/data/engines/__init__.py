"""Inference engines by name, each loaded only when asked for, so that nobody pays for a back end not in use.

A new engine is one line here and one file beside this one; `tests/data/test_engine_contract.py` says what it must do.
"""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Mapping
from importlib import import_module
from types import MappingProxyType
from typing import Any, cast

import msgspec

from rollart.config import nearest
from rollart.errors import ConfigError
from rollart.protocols import Engine

EngineFactory = Callable[..., Engine]
"""Called with the model's folder and the engine's own options as keywords."""

ENGINES: Mapping[str, str] = MappingProxyType(
    {
        "embedded": "rollart.data.engines.embedded:EmbeddedEngine",
        "emulated": "rollart.data.engines.emulated:emulated_engine",
        "vllm": "rollart.data.engines.vllm:VLLMEngine",
    }
)
"""Name -> `module:attribute` of its factory."""
PLAIN = (bool, int, float, str)
"""Types that are checked."""


def engine_factory(name: str) -> EngineFactory:
    """The factory of engine `name`. Raises ConfigError for an unknown name."""
    if name not in ENGINES:
        raise ConfigError(f"engine: unknown engine {name!r}{nearest(name, list(ENGINES))}")
    module, _, attribute = ENGINES[name].partition(":")
    return cast(EngineFactory, getattr(import_module(module), attribute))


def create_engine(engine: str | EngineFactory, model_folder: str, options: Mapping[str, Any]) -> Engine:
    """Build an engine from its name, or from a factory of the caller's own. Raises ConfigError for a wrong option."""
    factory = engine_factory(engine) if isinstance(engine, str) else engine
    check_options(factory, options)
    return factory(model_folder, **options)


def check_options(factory: Callable[..., Any], options: Mapping[str, Any]) -> None:
    """Raise ConfigError for options that `factory` does not know, or that are of another type."""
    known = inspect.signature(factory).parameters
    hints = _hints(factory)
    takes_any = any(each.kind is each.VAR_KEYWORD for each in known.values())
    for name, value in options.items():
        if name not in known and not takes_any:
            raise ConfigError(f"engine_options.{name}: unknown option{nearest(name, list(known)[1:])}")
        if (hint := hints.get(name)) in PLAIN:
            try:
                msgspec.convert(value, hint)
            except msgspec.ValidationError as error:
                raise ConfigError(f"engine_options.{name}: {error}") from error


def _hints(factory: Callable[..., Any]) -> dict[str, Any]:
    try:
        return typing.get_type_hints(getattr(factory, "__init__") if isinstance(factory, type) else factory)  # noqa: B009
    except NameError:  # what only a type checker knows
        return {}
