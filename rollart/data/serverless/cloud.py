"""What functions of clouds have in common: how a URL names one, how a key travels, and what the log of a call tells.

    scheme://name?region=...&endpoint=...     the endpoint is for local engines, private links and tests
    {"key": "...", "args": [...]}             the key stands in the event, for functions that keep results by it

Invariant: no secret stands in a URL; credentials come from the cloud's own chain. Neither AWS Lambda nor Function
Compute deduplicates calls that are waited for: a key protects the caller's side alone, unless the function reads it.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Set
from typing import Any, NamedTuple
from urllib.parse import parse_qsl

import msgspec

from rollart.checks import not_a_choice
from rollart.errors import ConfigError

CONCURRENCY = 128
"""Threads at most, as the clouds' clients block."""
CONNECT_TIMEOUT_S = 10.0

_DURATION = re.compile(r"(\w+ )?Duration: ([\d.]+) ms")


def parsed(url: str, known: Set[str]) -> tuple[str, dict[str, str]]:
    """The name and the options of a URL. Raises ConfigError."""
    name, _, query = url.partition("://")[2].partition("?")
    try:
        pairs = parse_qsl(query, strict_parsing=bool(query))
    except ValueError as error:
        raise ConfigError(f"{url!r}: {error}") from error
    if not name:
        raise ConfigError(f"{url!r}: names no function")
    options = dict(pairs)
    for key in options:
        if key not in known:
            raise ConfigError(f"{url!r}: option {not_a_choice(key, sorted(known))}")
    endpoint = options.get("endpoint", "")
    if endpoint and not re.fullmatch(r"https?://[^/@?#]+/?", endpoint):
        raise ConfigError(f"{url!r}: endpoint is https://host or http://host:port, and holds no secret")
    return name, options


def keyed(body: bytes, key: str) -> bytes:
    """An encoded event with its key."""
    return b'{"key":' + msgspec.json.encode(key) + b"," + body[1:] if key else body


class Spent(NamedTuple):
    """Of one call, where the cloud said so."""

    run_s: float | None = None
    billed_s: float | None = None
    cold: bool = False


def spent(tail: str) -> Spent:
    """From the end of a call's log, in Base64, as both clouds send it."""
    try:
        log = base64.b64decode(tail).decode(errors="replace")
    except binascii.Error:
        return Spent()
    said = {name.strip(): float(ms) / 1000 for name, ms in _DURATION.findall(log.rpartition("RequestId:")[2])}
    return Spent(said.get(""), said.get("Billed"), "Init" in said)


def fault(payload: bytes) -> tuple[str, str]:
    """The type and message of what a function raised outside of its handler."""
    try:
        said: Any = msgspec.json.decode(payload)
    except msgspec.DecodeError:
        said = None
    if not isinstance(said, dict):
        return "", shortened(payload.decode(errors="replace"))
    return str(said.get("errorType", "")), shortened(str(said.get("errorMessage", "")))


def shortened(text: str) -> str:
    """For errors."""
    return text if len(text) <= 400 else f"{text[:397]}..."
