"""A shelf in memory, through the protocol: it counts reads, can be full, and can fail."""

from __future__ import annotations

from collections.abc import Iterable

from rollart.data.stores.checksum import Buffer
from rollart.errors import WeightsError


class MemoryShelf:
    """`room`: most bytes that it takes; `broken`: what every call fails with, unless empty."""

    def __init__(self, room: int = 1 << 40, near: bool = True) -> None:
        self.values: dict[int, dict[str, bytes]] = {}
        self.manifests: dict[int, bytes] = {}
        self.room, self.near = room, near
        self.broken = ""
        self.reads: list[tuple[int, str]] = []

    @property
    def where(self) -> str:
        return "memory"

    def write(self, version: int, key: str, num_bytes: int, parts: Iterable[memoryview]) -> None:
        self._alive()
        data = b"".join(parts)
        assert len(data) == num_bytes
        if self.num_bytes + num_bytes > self.room:
            raise WeightsError(f"no room for {num_bytes} bytes")
        self.values.setdefault(version, {})[key] = data

    def seal(self, version: int, manifest: bytes) -> None:
        self._alive()
        self.manifests[version] = manifest

    def manifest(self, version: int) -> bytes | None:
        self._alive()
        return self.manifests.get(version)

    def read(self, version: int, key: str, num_bytes: int) -> Buffer | None:
        self._alive()
        self.reads.append((version, key))
        data = self.values.get(version, {}).get(key)
        return None if data is None else bytearray(data)

    def versions(self) -> list[int]:
        return sorted(self.manifests)

    def drop(self, version: int) -> None:
        self._alive()
        self.values.pop(version, None)
        self.manifests.pop(version, None)

    @property
    def num_bytes(self) -> int:
        return sum(len(data) for held in self.values.values() for data in held.values())

    def _alive(self) -> None:
        if self.broken:
            raise WeightsError(self.broken)
