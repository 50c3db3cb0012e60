"""A user's environment class as a task definition: its constructor's parameters are its options."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import Struct

from rollart.errors import ConfigError
from rollart.protocols import Env
from rollart.tasks.definition import TaskDefinition

_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def definition_of_class(name: str, cls: type, key: str, given: Mapping[str, Any]) -> TaskDefinition:
    """Wrap an environment class. Raises ConfigError when it lacks `reset` or `step`.

    `given` are the options of the config: a constructor that takes `**kwargs` accepts any of them.
    """
    missing = [method for method in ("reset", "step") if not callable(getattr(cls, method, None))]
    if missing:
        raise ConfigError(
            f"{key}: class {cls.__qualname__} is no environment: it has no method {' and no '.join(missing)}"
        )

    def build(options: Struct) -> Env:
        return typing.cast(Env, cls(**{field: getattr(options, field) for field in options.__struct_fields__}))

    summary = (inspect.getdoc(cls) or cls.__qualname__).splitlines()[0]
    return TaskDefinition(name=name, summary=summary, load=build, options=_options_struct(cls, given))


def _options_struct(cls: type, given: Mapping[str, Any]) -> type[Struct]:
    parameters = _parameters(cls)
    hints = _hints(cls)
    fields: list[Any] = []
    for parameter in parameters:
        if parameter.kind in _NAMED:
            kind = hints.get(parameter.name, Any)
            fields.append((parameter.name, kind, *_default(parameter)))
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters):
        known = {field[0] for field in fields}
        fields += [(option, Any) for option in given if option not in known]
    return msgspec.defstruct(f"{cls.__name__}Options", fields, frozen=True, kw_only=True, forbid_unknown_fields=True)


def _parameters(cls: type) -> list[inspect.Parameter]:
    try:
        return list(inspect.signature(cls).parameters.values())
    except ValueError:  # classes written in C have no signature
        return [inspect.Parameter("kwargs", inspect.Parameter.VAR_KEYWORD)]


def _default(parameter: inspect.Parameter) -> list[Any]:
    if parameter.default is inspect.Parameter.empty:
        return []
    return [msgspec.field(default_factory=lambda: parameter.default)]


def _hints(cls: type) -> dict[str, Any]:
    """Annotations that msgspec can check; the others are left to the constructor."""
    try:
        hints = typing.get_type_hints(inspect.getattr_static(cls, "__init__", None), include_extras=True)
    except (NameError, TypeError):
        return {}
    return {name: hint for name, hint in hints.items() if _is_checkable(hint)}


def _is_checkable(hint: Any) -> bool:
    try:
        msgspec.convert({}, dict[str, hint])
    except TypeError:
        return False
    return True
