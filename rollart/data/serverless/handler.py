"""The inside of a function, wherever it runs: `handler(event, context) -> dict`, the contract of AWS Lambda.

    event    {"args": [...], "kwargs": {...}}   or   {"batch": [event, ...]}
    reply    {"result": value}   or   {"error": {"type", "message", "trace"}}   or   {"batch": [reply, ...]}

Invariant: a call ends in a reply that JSON can hold, whatever the function does short of ending its process; one member
of a batch never costs another. This file needs nothing but the standard library and stands alone: `rollart
package-reward` copies it beside the function. What it leaves out: how events arrive.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import math
import os
import sys
import traceback
import typing
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

Handler = Callable[[Any, Any], "dict[str, Any]"]
TRAJECTORY = {"task", "seed", "prompts", "responses", "env_reward", "info"}


def make_handler(function: Callable[..., Any], options: Mapping[str, Any] | None = None) -> Handler:
    """The handler of a function, or of what a class makes of `options`."""
    if options and not inspect.isclass(function):
        raise TypeError(f"{function!r} is a plain function and takes no options; write a class that takes them")
    call = typing.cast("Callable[..., Any]", function(**(options or {}))) if inspect.isclass(function) else function
    convert = _converters(call)

    def handler(event: Any, context: Any = None) -> dict[str, Any]:  # noqa: ARG001 - the contract has a context
        if isinstance(event, dict) and isinstance(event.get("batch"), list):
            return {"batch": [_answer(call, convert, each) for each in event["batch"]]}
        return _answer(call, convert, event)

    return handler


def _answer(
    function: Callable[..., Any], convert: Mapping[str | int, Callable[[Any], Any]], event: Any
) -> dict[str, Any]:
    try:
        args, kwargs = _arguments(event)
        value = function(
            *(convert.get(index, _same)(value) for index, value in enumerate(args)),
            **{name: convert.get(name, _same)(value) for name, value in kwargs.items()},
        )
        if inspect.isawaitable(value):
            value = asyncio.run(_finish(value))
        return {"result": _plain(value)}
    except BaseException as error:  # sys.exit included: the process serves others
        return {"error": _described(error)}


def _arguments(event: Any) -> tuple[list[Any], dict[str, Any]]:
    if not isinstance(event, dict) or not {"args", "kwargs"} >= event.keys() - {"key"}:
        raise ValueError('an event is {"args": [...], "kwargs": {...}} or {"batch": [event, ...]}')
    args, kwargs = event.get("args", []), event.get("kwargs", {})
    if not isinstance(args, list) or not isinstance(kwargs, dict) or not all(isinstance(name, str) for name in kwargs):
        raise ValueError('"args" is a list and "kwargs" an object')
    return args, kwargs


def check_event(event: Any) -> None:
    """Raises ValueError for what is no event."""
    if not (isinstance(event, dict) and isinstance(event.get("batch"), list)):
        _arguments(event)


async def _finish(value: Any) -> Any:
    return await value


def _same(value: Any) -> Any:
    return value


def _converters(function: Callable[..., Any]) -> dict[str | int, Callable[[Any], Any]]:
    """By index and name: what turns a plain object into the parameter's class, where the class has fields."""
    call = function if inspect.isroutine(function) else type(function).__call__
    try:
        hints = typing.get_type_hints(call)
    except Exception:  # names that exist for a type checker only
        hints = {}
    names = list(inspect.signature(function).parameters)
    made: dict[str | int, Callable[[Any], Any]] = {}
    for index, name in enumerate(names):
        made[index] = made[name] = _converter(hints.get(name))
    return made


def _converter(kind: Any) -> Callable[[Any], Any]:
    if isinstance(kind, type) and hasattr(kind, "__struct_fields__"):
        import msgspec

        return lambda value: msgspec.convert(value, kind)
    if typing.get_origin(kind) is list and hasattr(typing.get_args(kind)[0], "__struct_fields__"):
        import msgspec

        return lambda value: msgspec.convert(value, kind)
    return _attributes if kind is None else _same


def _attributes(value: Any) -> Any:
    """A trajectory (`RewardRequest`), for a function that names no class for it: its entries as attributes."""
    if isinstance(value, dict) and value.keys() >= TRAJECTORY:
        return SimpleNamespace(**value)
    if isinstance(value, list):
        return [_attributes(each) for each in value]
    return value


def _plain(value: Any) -> Any:
    """The value as JSON holds it. Raises TypeError or ValueError."""
    if hasattr(value, "item") and callable(value.item) and getattr(value, "ndim", None) == 0:
        value = value.item()  # a number of numpy or torch
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"the function returned {value!r}, not a finite number")
    text = json.dumps(value, allow_nan=False, ensure_ascii=False).encode()  # refuses halves of characters
    return json.loads(text, parse_int=_integer)


def _integer(text: str) -> int:
    if len(text) > 20 or not -(2**63) <= (value := int(text)) < 2**64:
        raise ValueError(f"the function returned the integer {text[:30]}, which 64 bits do not hold")
    return value


def _described(error: BaseException) -> dict[str, str]:
    frames = traceback.extract_tb(error.__traceback__)[1:]
    try:
        message = str(error)
    except BaseException:
        message = "(its text cannot be shown)"
    trace = "".join(traceback.format_list(frames)) if frames else ""
    return {
        "type": type(error).__name__,
        "message": _utf8(message)[:2000],
        "where": f"{os.path.basename(frames[-1].filename)}:{frames[-1].lineno}" if frames else "",
        "trace": _utf8(trace)[-4000:],
    }


def _utf8(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode()


def load(target: str) -> Callable[..., Any]:
    """The object at `module:name`; for deployed functions, which have no more of rollart than this file."""
    import importlib

    module, _, name = target.partition(":")
    sys.path.insert(0, ".")
    found: Any = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    return typing.cast("Callable[..., Any]", found)
