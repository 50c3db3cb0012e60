"""What driver and worker tell each other before anything else: which rollart they are, and the shapes of what travels.

A call between two states of rollart fails deep inside, with a TypeError or a value in the wrong field; this tells it
before the first one. Invariant: a greeting is a MessagePack map of text to text with the keys `rollart` and `wire`,
whatever the versions, so that any can read any other's. What this file leaves out: which worker runs where.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import inspect
from collections.abc import Iterable, Iterator
from types import ModuleType
from typing import Any

import msgspec
from msgspec import Struct

from rollart import __version__
from rollart.errors import ResourceError

TRAVELLING = ("rollart.types", "rollart.sections", "rollart.protocols", "rollart.data.wire", "rollart.data.roles")
"""Modules whose Structs, methods and functions say what a message looks like."""


@functools.cache
def greeting() -> bytes:
    """Of this process."""
    return msgspec.msgpack.encode({"rollart": __version__, "wire": shapes(map(importlib.import_module, TRAVELLING))})


def check_greeting(theirs: bytes, who: str) -> None:
    """Raises ResourceError where a greeting is of another rollart than this process's; `who` it is of begins it."""
    here, there = (msgspec.msgpack.decode(each, type=dict[str, str]) for each in (greeting(), theirs))
    if (here["rollart"], here["wire"]) != (there.get("rollart"), there.get("wire")):
        raise ResourceError(
            f"{who} has {_shown(there)}, but here is {_shown(here)}: what they send each other differs; install the "
            "same rollart on all machines, or start again where it was changed under a run"
        )


def _shown(one: dict[str, str]) -> str:
    return f"rollart {one.get('rollart', '(of no version)')} (wire format {one.get('wire', 'unknown')})"


def shapes(modules: Iterable[ModuleType]) -> str:
    """A digest of names and types of all that travels, as the sources have them; comments and bodies do not count."""
    lines = sorted(line for module in modules for line in _shapes(module))
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:8]


def _shapes(module: ModuleType) -> Iterator[str]:
    for name, value in vars(module).items():
        if getattr(value, "__module__", "") != module.__name__:
            continue
        if inspect.isfunction(value):
            yield _line(name, value)
        elif isinstance(value, type):
            if issubclass(value, Struct):
                yield _line(name, value)
            yield from (_line(f"{name}.{key}", each) for key, each in vars(value).items() if inspect.isfunction(each))


def _line(name: str, annotated: Any) -> str:
    return f"{name} {list(annotated.__annotations__.items())}"
