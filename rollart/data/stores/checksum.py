"""Checksums of buckets, by name: the fastest one that is installed writes, and the name travels in the manifest.

    xxh3_64   64 bits at the speed of memory; the extra `weights`
    crc32     32 bits, always there, two to three gigabytes per second

Invariant: a checksum of an algorithm that is not here is an error, never taken for granted. What this file leaves out:
what is summed. A checksum finds damage, not malice.
"""

from __future__ import annotations

import importlib
import importlib.util
import zlib
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Protocol

from rollart.errors import WeightsError, to_install

Buffer = Any
"""Anything with the buffer protocol."""


class Checksum(Protocol):
    """A sum that is still being taken."""

    def update(self, data: Buffer) -> None:
        """Take in more bytes."""
        ...

    def value(self) -> int:
        """The sum of all bytes so far, at most 64 bits."""
        ...


class _Crc32:
    def __init__(self) -> None:
        self._value = 0

    def update(self, data: Buffer) -> None:
        self._value = zlib.crc32(data, self._value)

    def value(self) -> int:
        return self._value


class _Xxh3:
    def __init__(self) -> None:
        self._state: Any = importlib.import_module("xxhash").xxh3_64()

    def update(self, data: Buffer) -> None:
        self._state.update(data)

    def value(self) -> int:
        return int(self._state.intdigest())


CHECKSUMS: Mapping[str, Callable[[], Checksum]] = MappingProxyType({"xxh3_64": _Xxh3, "crc32": _Crc32})


def fastest() -> str:
    """The algorithm that a writer takes."""
    return "xxh3_64" if importlib.util.find_spec("xxhash") is not None else "crc32"


def begin(algorithm: str) -> Checksum:
    """A new sum. Raises WeightsError for an algorithm that is unknown or not installed here."""
    if algorithm not in CHECKSUMS:
        raise WeightsError(f"checksums of kind {algorithm!r} are unknown here: trainer and engines run other versions")
    try:
        return CHECKSUMS[algorithm]()
    except ModuleNotFoundError as error:
        raise WeightsError(
            f"the weights have checksums of kind {algorithm}, which need the package xxhash here too: "
            + to_install("weights")
        ) from error


def checksum(algorithm: str, data: Buffer) -> int:
    """The sum of one buffer."""
    running = begin(algorithm)
    running.update(data)
    return running.value()
