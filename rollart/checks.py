"""Fitting plain values to Struct types, with errors that a person can act on.

Invariant: whatever `check` lets pass, `msgspec.convert` accepts, and every complaint is one `ConfigError` line that
starts with the full name of the key. What this file leaves out: rules that join two keys (`config.py`).
"""

from __future__ import annotations

import difflib
import math
import typing
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from msgspec import NODEFAULT, Struct, inspect
from msgspec.structs import fields

from rollart import toml
from rollart.errors import ConfigError

INT64 = 2**63


def nearest(word: str, choices: Sequence[str]) -> str:
    """`; did you mean 'x'?` or the list of choices, to end an error line with."""
    close = _closest(word, choices)
    return f"; did you mean {close!r}?" if close else f"; choose from {', '.join(sorted(choices))}"


def _closest(word: str, choices: Sequence[str]) -> str | None:
    lower = {choice.lower(): choice for choice in choices}
    close = difflib.get_close_matches(word.lower(), lower, n=1, cutoff=0.5)
    return lower[close[0]] if close else None


def not_a_choice(word: object, choices: Sequence[str]) -> str:
    """Why `word` is refused, the nearest choice and all of them."""
    close = _closest(word, choices) if isinstance(word, str) else None
    hint = f"did you mean {close!r}? " if close else ""
    return f"{_shown(word)} is not a choice; {hint}choose from {', '.join(choices)}"


def check(kind: type[Struct], data: Mapping[str, Any], path: str = "", root: type[Struct] | None = None) -> None:
    """Check a table, and the tables in it, against a Struct. Raises ConfigError that names the key."""
    known = {field.name: field for field in fields(kind)}
    for name, value in data.items():
        here = f"{path}{toml.key(name)}"
        if name not in known:
            raise ConfigError(f"{here}: {_unknown(name, value, list(known), root or kind)}")
        default = known[name].default
        _check_value(known[name].type, value, here, root or kind, None if default is NODEFAULT else default)


def _unknown(name: str, value: object, names: list[str], root: type[Struct]) -> str:
    what = "unknown table" if isinstance(value, dict) else "unknown key"
    for field in fields(root):
        if _is_table(field.type) and name in field.type.__struct_fields__:
            return f"{what}; did you mean {f'{field.name}.{name}'!r}?"
    return what + nearest(name, names)


def _is_table(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, Struct)


def _check_value(kind: Any, value: Any, path: str, root: type[Struct], default: object) -> None:
    if _is_table(kind):
        check(kind, _table(value, path), f"{path}.", root)
    elif typing.get_origin(kind) is dict and _is_table(typing.get_args(kind)[1]):
        for name, inner in _table(value, path).items():
            _check_value(typing.get_args(kind)[1], inner, f"{path}.{toml.key(name)}", root, None)
    else:
        if not isinstance(value, float):  # numbers are judged by the key's own bounds
            _check_plain(value, path)
        try:
            msgspec.convert(value, kind)
        except msgspec.ValidationError as error:
            raise ConfigError(f"{path}: {_complaint(inspect.type_info(kind), value, default)}") from error
        if isinstance(value, float) and not math.isfinite(value):
            raise ConfigError(f"{path}: {_complaint(inspect.type_info(kind), value, default)}")


def _table(value: object, path: str) -> dict[str, Any]:
    if isinstance(value, dict):
        return value
    raise ConfigError(f"{path}: expected a table, written as [{path}], got {_shown(value)}")


def _check_plain(value: object, path: str) -> None:
    """Only what TOML, JSON and MessagePack can all carry, and compares equal to itself."""
    if isinstance(value, dict):
        for name, inner in value.items():
            _check_plain(name, path)
            _check_plain(inner, f"{path}.{toml.key(name)}")
    elif isinstance(value, list):
        for inner in value:
            _check_plain(inner, path)
    elif isinstance(value, str):
        if not value.isascii() and any("\ud800" <= char <= "\udfff" for char in value):
            raise ConfigError(f"{path}: {value!r} is not UTF-8 text")
    elif isinstance(value, int):
        if not -INT64 <= value < INT64:
            raise ConfigError(f"{path}: {value} does not fit into 64 bits")
    elif isinstance(value, float):
        if not math.isfinite(value):
            raise ConfigError(f"{path}: must be finite, not {value}")
    else:
        raise ConfigError(f"{path}: {type(value).__name__} is not supported; write it as text in quotes")


def _complaint(info: inspect.Type, value: object, default: object) -> str:
    """Why a value does not fit a type."""
    if isinstance(info, inspect.UnionType):
        info = next(kind for kind in info.types if not isinstance(kind, inspect.NoneType))
    if isinstance(info, inspect.LiteralType):
        return not_a_choice(value, [str(choice) for choice in info.values])
    if isinstance(info, inspect.IntType | inspect.FloatType):
        return _bad_number(info, value, default)
    if isinstance(info, inspect.BoolType):
        return f"expected true or false, got {_shown(value)}"
    if isinstance(info, inspect.ListType):
        return f'expected a list such as ["a", "b"], got {_shown(value)}'
    if isinstance(info, inspect.DictType):
        return f"expected a table such as {{ size = 4 }}, got {_shown(value)}"
    quoted = toml.value(str(value)) if not isinstance(value, list | dict) else '"cpu"'
    return f"expected text in quotes such as {quoted}, got {_shown(value)}"


def _bad_number(info: inspect.IntType | inspect.FloatType, value: object, default: object) -> str:
    whole = isinstance(info, inspect.IntType)
    expected = "a whole number" if whole else "a number"
    if info.ge is not None and info.le is not None:
        limits = f"from {info.ge:g} to {info.le:g}"
    else:
        bounds = {"of at least": info.ge, "above": info.gt, "below": info.lt, "of at most": info.le}
        limits = " and ".join(f"{word} {bound:g}" for word, bound in bounds.items() if bound is not None)
    expected = f"{expected} {limits}".strip()
    if isinstance(value, int | float) and not isinstance(value, bool) and not (whole and isinstance(value, float)):
        return f"{value!r} is out of range; expected {expected}"
    example = f" such as {toml.value(default)}" if isinstance(default, int | float) else ""
    return f"expected {expected}{example}, got {_shown(value)}"


def _shown(value: object) -> str:
    if isinstance(value, dict):
        return "a table"
    if isinstance(value, list):
        return "a list"
    return repr(value) if isinstance(value, str) else toml.value(value)
