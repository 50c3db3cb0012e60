"""TOML text from plain values, and `section.key=value` overrides into plain values.

Invariant: what `write` makes, `tomllib` reads back to equal values. What this file leaves out: which keys exist and
which values they take (`checks.py`).
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from rollart.errors import ConfigError


def write(data: Mapping[str, Any], nested: Iterable[str] = ()) -> str:
    """Values first, then one `[table]` each; a table named in `nested` holds tables itself: `[tasks.NAME]`."""
    values = {name: value for name, value in data.items() if not isinstance(value, dict)}
    tables: dict[str, dict[str, Any]] = {}
    for name, value in data.items():
        if isinstance(value, dict) and name in nested:
            tables |= {f"{key(name)}.{key(inner)}": table for inner, table in value.items()}
        elif isinstance(value, dict):
            tables[key(name)] = value
    blocks = [_lines(values), *([f"[{header}]", *_lines(table)] for header, table in tables.items())]
    return "\n\n".join("\n".join(block) for block in blocks) + "\n"


def _lines(table: Mapping[str, Any]) -> list[str]:
    return [f"{key(name)} = {value(inner)}" for name, inner in table.items()]


def key(name: str) -> str:
    """A bare key, or a quoted one."""
    bare = name.isascii() and name.replace("_", "").replace("-", "").isalnum()
    return name if bare else _text(name)


def value(plain: Any) -> str:
    """A string, number, boolean, list or inline table."""
    if isinstance(plain, bool):
        return "true" if plain else "false"
    if isinstance(plain, dict):
        inner = ", ".join(f"{key(name)} = {value(item)}" for name, item in plain.items())
        return f"{{ {inner} }}" if inner else "{}"
    if isinstance(plain, list | tuple):
        return "[" + ", ".join(map(value, plain)) + "]"
    return _text(plain) if isinstance(plain, str) else repr(plain)


def _text(plain: str) -> str:
    # A JSON string is a TOML basic string, but for DEL, which TOML wants escaped.
    return msgspec.json.encode(plain).decode().replace("\x7f", "\\u007f")


def apply(data: dict[str, Any], override: str) -> None:
    """Set `a.b=value` in `data`. The value is TOML; what is not TOML is taken as text. Raises ConfigError."""
    if any("\ud800" <= char <= "\udfff" for char in override):
        raise ConfigError(f"override {override!r} is not UTF-8 text; is the terminal's locale one of UTF-8?")
    path, separator, text = override.partition("=")
    names = _path(path) if separator else None
    if not names:
        raise ConfigError(f"override {override!r}: write it as section.key=value, for example train.learning_rate=3e-4")
    table = data
    for name in names[:-1]:
        table = table.setdefault(name, {})
        if not isinstance(table, dict):
            raise ConfigError(f"override {override!r}: {name!r} is a value, not a table")
    table[names[-1]] = _parsed(text)


def _path(text: str) -> list[str] | None:
    """The names of a dotted key such as `tasks."my:Env".weight`, read as TOML reads it; None when it is not a key."""
    try:
        node: Any = tomllib.loads(f"{text.strip()} = 0")
    except (tomllib.TOMLDecodeError, RecursionError):
        return None
    names = []
    while isinstance(node, dict):
        if len(node) != 1:
            return None
        name, node = next(iter(node.items()))
        names.append(name)
    return names


def _parsed(text: str) -> Any:
    try:
        data = tomllib.loads(f"value = {text}")
    except (tomllib.TOMLDecodeError, RecursionError):
        return text
    return data["value"] if len(data) == 1 else text
