"""Checks on what user code returned, before it reaches anything else: each fault says what came back."""

from __future__ import annotations

import math
import numbers
from typing import Any

import numpy as np

from rollart.errors import EnvError, RewardError
from rollart.types import EnvReply


def reset_reply(value: Any, what: str) -> EnvReply:
    """Check (observation, info). Raises EnvError."""
    if not isinstance(value, tuple) or len(value) != 2:
        raise EnvError(f"{what} returned {shown(value)}; expected (observation, info)")
    observation, info = value
    return EnvReply(_text(observation, what), info=_plain_info(info, what))


def step_reply(value: Any, what: str) -> EnvReply:
    """Check (observation, reward, terminated, truncated, info). Raises EnvError."""
    if not isinstance(value, tuple) or len(value) != 5:
        raise EnvError(f"{what} returned {shown(value)}; expected (observation, reward, terminated, truncated, info)")
    observation, reward, terminated, truncated, info = value
    if not _is_finite(reward):
        raise EnvError(f"{what} returned reward {shown(reward)}; expected a finite number")
    for name, flag in (("terminated", terminated), ("truncated", truncated)):
        if not isinstance(flag, bool | np.bool_):
            raise EnvError(f"{what} returned {name} {shown(flag)}; expected True or False")
    return EnvReply(
        _text(observation, what), float(reward), bool(terminated), bool(truncated), info=_plain_info(info, what)
    )


def score(value: Any, what: str) -> float:
    """Check a reward. Raises RewardError."""
    if not _is_finite(value):
        raise RewardError(f"{what} returned {shown(value)}; expected a finite number")
    return float(value)


def shown(value: Any) -> str:
    """A value in an error line: None, or its type and the start of its text."""
    if value is None:
        return "None"
    text = repr(value)
    size = f" of {len(value)}" if isinstance(value, tuple) else ""
    return f"{type(value).__name__}{size} {text if len(text) <= 80 else text[:77] + '...'}"


def _text(observation: Any, what: str) -> str:
    if not isinstance(observation, str):
        raise EnvError(f"{what} returned observation {shown(observation)}; expected a str")
    if not _is_utf8(observation):
        raise EnvError(f"{what} returned observation {shown(observation)}; expected text that UTF-8 can hold")
    return str(observation)


def _is_utf8(text: str) -> bool:
    return text.isascii() or not any("\ud800" <= char <= "\udfff" for char in text)


def _plain_info(info: Any, what: str) -> dict[str, Any]:
    if not isinstance(info, dict):
        raise EnvError(f"{what} returned info {shown(info)}; expected a dict")
    return {key: value for key, value in info.items() if _is_plain_key(key) and _is_plain(value)}


def _is_plain_key(key: Any) -> bool:
    return type(key) is str and _is_utf8(key)


def _is_plain(value: Any) -> bool:
    """Whether `value` is data that can travel: None, numbers, text, and lists and dicts of them."""
    if isinstance(value, list):
        return all(map(_is_plain, value))
    if isinstance(value, dict):
        return all(_is_plain_key(key) and _is_plain(inner) for key, inner in value.items())
    if type(value) is int:
        return -(2**63) <= value < 2**63
    if type(value) is str:
        return _is_utf8(value)
    return value is None or type(value) in (bool, float)


def _is_finite(value: Any) -> bool:
    return isinstance(value, numbers.Real) and math.isfinite(value)
