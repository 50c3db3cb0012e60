"""Inference engines by name, each loaded only when asked for, so that nobody pays for a back end not in use.

A new engine is one line here and one file beside this one; `tests/data/test_engine_contract.py` says what it must do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from types import MappingProxyType
from typing import Any, cast

from rollart.config import nearest
from rollart.errors import ConfigError
from rollart.protocols import Engine

EngineFactory = Callable[..., Engine]
"""Called with the model's folder and the engine's own options as keywords."""

ENGINES: Mapping[str, str] = MappingProxyType(
    {
        "embedded": "rollart.data.engines.embedded:EmbeddedEngine",
        "emulated": "rollart.data.engines.emulated:emulated_engine",
    }
)
"""Name -> `module:attribute` of its factory."""


def engine_factory(name: str) -> EngineFactory:
    """The factory of engine `name`. Raises ConfigError for an unknown name."""
    if name not in ENGINES:
        raise ConfigError(f"engine: unknown engine {name!r}{nearest(name, list(ENGINES))}")
    module, _, attribute = ENGINES[name].partition(":")
    return cast(EngineFactory, getattr(import_module(module), attribute))


def create_engine(engine: str | EngineFactory, model_folder: str, options: Mapping[str, Any]) -> Engine:
    """Build an engine from its name, or from a factory of the caller's own."""
    factory = engine_factory(engine) if isinstance(engine, str) else engine
    return factory(model_folder, **options)
