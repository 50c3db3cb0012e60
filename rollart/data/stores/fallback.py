"""FallbackStore: one store, and another that stands in for good once the first has failed.

    publish   into the first; WeightsLost when that fails, and ever after into the second
    rescue    into the second
    fetch     from the second if it has the version, else from the first; WeightsLost when that fails
    clear     what the first still has is dropped once the second has taken a version that was not rescued

Tensors are read once per call, as reading them may be the work of many processes: who sees WeightsLost, and still has
those weights, calls `rescue`.
Invariants: no version is published twice with different weights; a change of place is said in the manifest's `note`.
What this file leaves out: the stores.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from msgspec.structs import replace

from rollart.errors import WeightsError, WeightsLost
from rollart.protocols import Tensors, WeightStore
from rollart.types import ParameterInfo, WeightManifest


class SecondStore(WeightStore, Protocol):
    """A store that can say at once what it has."""

    @property
    def where(self) -> str:
        """For people, to follow the word "in"."""
        ...

    def has(self, version: int) -> bool:
        """Whether a version is there."""
        ...

    def manifest(self, version: int) -> WeightManifest:
        """What it consists of."""
        ...


class FallbackStore:
    """Implements `protocols.WeightStore`. `clear`: drops what the first has, where others may be short of its room."""

    def __init__(self, first: WeightStore, second: SecondStore, clear: Callable[[], None] | None = None) -> None:
        self._first, self._second, self._clear = first, second, clear
        self._published: set[int] = set()
        self._failure = ""
        """Why the first is not used any more."""

    def publish(self, version: int, tensors: Tensors) -> WeightManifest:
        """Into the first, while it works. Raises WeightsLost when it fails now, WeightsError when the second does."""
        if version in self._published:
            raise WeightsError(f"version {version} is already published and cannot change")
        if self._failure:
            manifest = self._second.publish(version, tensors)
            if self._clear is not None:
                self._clear()
        else:
            try:
                manifest = self._first.publish(version, tensors)
            except WeightsError as error:
                self._failure = str(error)
                raise WeightsLost(self._failure) from error
        self._published.add(version)
        return manifest

    def rescue(self, version: int, tensors: Tensors) -> WeightManifest:
        """Into the second, unless it is there. Raises WeightsError."""
        if self._second.has(version):
            return self._second.manifest(version)
        self._failure = self._failure or f"version {version} is lost"
        manifest = self._second.publish(version, tensors)
        self._published.add(version)
        note = f"{self._failure}; from version {version} on, they go through files in {self._second.where}"
        return replace(manifest, note=note)

    def fetch(self, version: int, model: Sequence[ParameterInfo] | None = None) -> Iterator[tuple[str, Any]]:
        """From where it is. Raises WeightsError from the second, WeightsLost from the first."""
        if self._second.has(version):
            return self._second.fetch(version, model)
        with _lost():
            return _reaching(self._first.fetch(version, model))

    def quick(self, version: int) -> bool:
        """What the store says that has it."""
        return (self._second if self._second.has(version) else self._first).quick(version)


def _reaching(tensors: Iterator[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    with _lost():
        yield from tensors


@contextmanager
def _lost() -> Iterator[None]:
    try:
        yield
    except WeightsError as error:
        raise WeightsLost(str(error)) from error
