"""Shelf: a place where the bytes of versions lie, without any notion of what they mean.

Invariants of every shelf: a version is there once it was sealed, and never changes; what `read` returns nobody changes,
also after the version was dropped. What this file leaves out: shelves (`files.py`, `mooncake_shelf.py`), and buckets,
checksums, differences and which versions are kept (`data/weights.py`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from rollart.data.stores.checksum import Buffer


class Shelf(Protocol):
    """One writer, any number of readers in other processes. Every method raises WeightsError when the place fails."""

    @property
    def where(self) -> str:
        """For people, to follow the word "in"."""
        ...

    @property
    def near(self) -> bool:
        """Whether asking for little takes no time to speak of."""
        ...

    def write(self, version: int, key: str, num_bytes: int, parts: Iterable[memoryview]) -> None:
        """Put the parts, one after the other, under a key of a version that is not sealed; `num_bytes` in all."""
        ...

    def seal(self, version: int, manifest: bytes) -> None:
        """From now on the version is there."""
        ...

    def manifest(self, version: int) -> bytes | None:
        """What `seal` was given; None for a version that is not there."""
        ...

    def read(self, version: int, key: str, num_bytes: int) -> Buffer | None:
        """A writable buffer with what was put there, private to the caller; None when the key is not there."""
        ...

    def versions(self) -> list[int]:
        """Those that are there, oldest first, as far as this process can know."""
        ...

    def drop(self, version: int) -> None:
        """Forget a version, sealed or not; nothing to do when it is not there."""
        ...
