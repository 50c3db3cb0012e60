"""Versions of the weights on a shelf, for one writer and any number of readers in other processes.

    publish   tensors -> buckets of about `bucket_bytes` -> shelf, one after the other; then the manifest
    fetch     manifest -> bucket by bucket: read, sum, compare, give out its tensors in the bucket's own memory

With `delta`, every `delta`-th version is whole; a version between them holds, per bucket, only what changed since the
version before. A reader goes back from the version that it wants to the last whole one, or to the one that it read
last, and forward again bucket by bucket.

Invariants: a published version never changes; the newest `keep` versions, and what they are differences to, are there;
whatever `fetch` gives out has passed its bucket's checksum, in full, also when it was put together from differences;
weights of another model are refused before the first bucket is read. Without `delta`, neither side holds more than a
bucket beside the weights; with it, each side keeps the version that it had last.
What this file leaves out: where bytes lie (`stores/files.py`, `stores/mooncake_shelf.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace
from torch import Tensor

from rollart.data.stores import delta as deltas
from rollart.data.stores.bucket import in_buckets, num_bytes, parts_of, tensors_of
from rollart.data.stores.checksum import Buffer, Checksum, begin, checksum, fastest
from rollart.data.stores.fallback import FallbackStore
from rollart.data.stores.files import FileShelf
from rollart.data.stores.manifest import check_model, fingerprint, info_of
from rollart.data.stores.shelf import Shelf
from rollart.errors import ConfigError, WeightsError, boundary
from rollart.protocols import WeightStore
from rollart.types import Bucket, ParameterInfo, WeightManifest

SLICE_BYTES = 1 << 20
"""Summed and written piece by piece, a bucket is read from memory once."""
SMALL_BYTES = 4 << 20
"""Weights of so little are read in a few milliseconds."""
WORTHWHILE = 0.75
"""A difference that is larger than this share of its bucket is not worth the work of putting it together."""

Held = tuple[int, list[Buffer]]
"""A version and its whole buckets."""


class BucketStore:
    """Implements `protocols.WeightStore` on a shelf.

    `bucket_bytes`: a bucket is closed before it grows beyond this; a larger tensor has one of its own.
    `keep`: versions kept, at least 2, so that the one being read is not the one dropped.
    `delta`: a whole version every so many; 0 or 1: always.
    `algorithm`: of the checksums, default the fastest here.
    """

    def __init__(self, shelf: Shelf, bucket_bytes: int, keep: int, delta: int = 0, algorithm: str = "") -> None:
        if keep < 2:
            raise ConfigError(f"weights.keep: {keep} would drop the version that engines are reading; take at least 2")
        self.shelf = shelf
        self._bucket_bytes = bucket_bytes
        self._keep = keep
        self._delta = delta
        self._algorithm = algorithm or fastest()
        self._written: Held | None = None
        self._num_since_whole = 0
        self._held: Held | None = None

    @property
    def where(self) -> str:
        """For people, to follow the word "in"."""
        return self.shelf.where

    # --------------------------------------------------------------------------------------------------------- writing
    def publish(self, version: int, tensors: Iterable[tuple[str, Tensor]]) -> WeightManifest:
        """Write buckets, then the manifest; drop versions beyond the number kept.

        Raises WeightsError when the version exists, a name comes twice, or there is no room; then the version does
        not exist.
        """
        where = self.shelf.where
        if self.shelf.manifest(version) is not None:
            raise WeightsError(f"version {version} is already published in {where} and cannot change")
        written, self._written = self._written, None  # until this one is whole
        try:
            with boundary(WeightsError, f"publishing version {version} in {where}"):
                self.shelf.drop(version)  # what a publisher that died left behind
                manifest = self._write_version(version, tensors, self._base(written))
                self.shelf.seal(version, msgspec.json.encode(manifest))
        except WeightsError:
            self._written = None
            with suppress(WeightsError):
                self._forget(version)
            raise
        self._num_since_whole = 0 if manifest.base is None else self._num_since_whole + 1
        for old in self._superfluous():
            self._forget(old)
        return manifest

    def _base(self, written: Held | None) -> Held | None:
        """What the next version may be a difference to."""
        return written if self._num_since_whole + 1 < self._delta else None

    def _write_version(self, version: int, tensors: Iterable[tuple[str, Tensor]], base: Held | None) -> WeightManifest:
        buckets: list[Bucket] = []
        parameters: dict[str, ParameterInfo] = {}
        held: list[Buffer] = []
        for group in in_buckets(tensors, self._bucket_bytes):
            if twice := parameters.keys() & group.keys():
                raise WeightsError(f"parameter {min(twice)!r} comes twice")
            parameters |= {name: info_of(name, tensor) for name, tensor in group.items()}
            key = f"bucket-{len(buckets):04d}.safetensors"
            if self._delta < 2:
                buckets.append(self._write_bucket(version, key, group))
            else:
                whole = memoryview(bytearray().join(parts_of(group)))
                buckets.append(self._write_change(version, key, group, whole, _taken(base, len(held))))
                held.append(whole)
            del group  # before the next one is gathered
        if self._delta > 1:
            self._written = version, held
        return WeightManifest(
            version,
            tuple(buckets),
            tuple(parameters.values()),
            model=fingerprint(parameters.values()),
            checksums=self._algorithm,
            base=base[0] if base is not None and any(bucket.delta for bucket in buckets) else None,
        )

    def _write_bucket(self, version: int, key: str, group: Mapping[str, Tensor]) -> Bucket:
        parts, running = parts_of(group), begin(self._algorithm)
        size = num_bytes(parts)
        self.shelf.write(version, key, size, _summed(parts, running))
        return Bucket(key, size, running.value(), tuple(group))

    def _write_change(
        self, version: int, key: str, group: Mapping[str, Tensor], whole: memoryview, before: Buffer | None
    ) -> Bucket:
        """What changed since `before`, or everything where that is less or there is no such bucket."""
        bucket = Bucket(key, whole.nbytes, checksum(self._algorithm, whole), tuple(group))
        if before is None or whole.nbytes != memoryview(before).nbytes or whole.nbytes > deltas.MAX_BYTES:
            self.shelf.write(version, key, whole.nbytes, [whole])
            return bucket
        change = deltas.difference(before, whole, min(tensor.element_size() for tensor in group.values()))
        if change is None:
            return replace(bucket, key="", delta=True, stored_bytes=0)
        if len(change) > WORTHWHILE * whole.nbytes:
            self.shelf.write(version, key, whole.nbytes, [whole])
            return bucket
        key = key.replace(".safetensors", ".delta")
        self.shelf.write(version, key, len(change), [memoryview(change)])
        return replace(bucket, key=key, delta=True, stored_bytes=len(change))

    def _superfluous(self) -> list[int]:
        """Versions beyond those kept that no kept one is a difference to."""
        versions = self.shelf.versions()
        needed = set(versions[-self._keep :])
        for version in sorted(needed, reverse=True):
            while (base := self.manifest(version).base) is not None:
                needed.add(version := base)
        return [version for version in versions if version not in needed]

    def _forget(self, version: int) -> None:
        with boundary(WeightsError, f"dropping version {version} in {self.shelf.where}"):
            self.shelf.drop(version)

    # --------------------------------------------------------------------------------------------------------- reading
    def fetch(self, version: int, model: Sequence[ParameterInfo] | None = None) -> Iterator[tuple[str, Tensor]]:
        """Read a version bucket by bucket, in the order published; nobody changes these tensors any more.

        `model`: what its parameters must be. Raises WeightsError, at once for a version that is missing or of another
        model, and before it gives out anything of a bucket that is missing or damaged.
        """
        manifest = self.manifest(version)
        if model is not None:
            check_model(manifest, model, self.shelf.where)
        held, self._held = self._held, None  # its buckets are let go one after the other
        return self._tensors(self._chain(manifest, held), held)

    def _tensors(self, chain: list[WeightManifest], base: Held | None) -> Iterator[tuple[str, Tensor]]:
        manifest = chain[0]
        held: list[Buffer] = []
        for index, bucket in enumerate(manifest.buckets):
            buffer = self._bucket(index, chain, _taken(base, index))
            if self._delta > 1:
                held.append(buffer)
            with boundary(WeightsError, f"{bucket.key} of version {manifest.version} in {self.shelf.where} is damaged"):
                yield from tensors_of(buffer, bucket.names)
        if self._delta > 1:
            self._held = manifest.version, held

    def _chain(self, manifest: WeightManifest, held: Held | None) -> list[WeightManifest]:
        """This version and those that it is a difference to, newest first, back to the one held or a whole one."""
        chain = [manifest]
        while (base := chain[-1].base) is not None and (held is None or base != held[0]):
            chain.append(self.manifest(base))
        return chain

    def _bucket(self, index: int, chain: list[WeightManifest], base: Buffer | None) -> Buffer:
        """One whole bucket that has passed its checksum; what was held is not trusted more than what is read."""
        try:
            return self._verified(index, chain, base)
        except WeightsError:
            if base is None:
                raise
            return self._verified(index, self._chain(chain[0], None), None)

    def _verified(self, index: int, chain: list[WeightManifest], base: Buffer | None) -> Buffer:
        newest = chain[0].buckets[index]
        buffer = self._assembled(index, chain, base)
        found, size = checksum(chain[0].checksums, buffer), memoryview(buffer).nbytes
        if size != newest.num_bytes or found != newest.checksum:
            raise WeightsError(
                f"{newest.key or f'bucket {index}'} of version {chain[0].version} in {self.shelf.where} is damaged: "
                f"{size} bytes with checksum {found}, published were {newest.num_bytes} bytes with {newest.checksum}"
            )
        return buffer

    def _assembled(self, index: int, chain: list[WeightManifest], base: Buffer | None) -> Buffer:
        """From the newest version in the chain where the bucket is whole, else from `base`, forward again."""
        changes: list[Buffer] = []
        whole = base
        with boundary(WeightsError, f"bucket {index} of version {chain[0].version} in {self.shelf.where} is damaged"):
            for manifest in chain:
                bucket = manifest.buckets[index]
                if not bucket.delta:
                    whole = self._read(manifest.version, bucket.key, bucket.num_bytes)
                    break
                if bucket.stored_bytes:
                    changes.append(self._read(manifest.version, bucket.key, bucket.stored_bytes))
            if whole is None:
                raise ValueError("it is a difference to nothing")
            for change in reversed(changes):
                whole = deltas.applied(whole, change)
        return whole

    def _read(self, version: int, key: str, size: int) -> Buffer:
        data = self.shelf.read(version, key, size)
        if data is None:
            raise self._missing(version)
        return data

    def manifest(self, version: int) -> WeightManifest:
        """What a version consists of. Raises WeightsError."""
        data = self.shelf.manifest(version)
        if data is None:
            raise self._missing(version)
        with boundary(WeightsError, f"manifest of version {version} in {self.shelf.where} is damaged"):
            manifest = msgspec.json.decode(data, type=WeightManifest)
            if manifest.version != version or (manifest.base is not None and manifest.base >= version):
                raise ValueError(f"it says version {manifest.version}, base {manifest.base}")
        return manifest

    def has(self, version: int) -> bool:
        """Whether a version is there."""
        return self.shelf.manifest(version) is not None

    def quick(self, version: int) -> bool:
        """Whether fetching it takes a few milliseconds at most, or fails as fast."""
        if not self.shelf.near:
            return False
        try:
            return sum(bucket.num_bytes for bucket in self.manifest(version).buckets) <= SMALL_BYTES
        except WeightsError:
            return True

    def rescue(self, version: int, tensors: Iterable[tuple[str, Any]]) -> WeightManifest:  # noqa: ARG002
        """There is no other place. Raises WeightsError."""
        raise WeightsError(f"version {version} cannot be read from {self.shelf.where}, and there is no other place")

    def latest(self) -> int | None:
        """The newest published version."""
        return max(self.versions(), default=None)

    def versions(self) -> list[int]:
        """All published versions, oldest first."""
        return self.shelf.versions()

    def _missing(self, version: int) -> WeightsError:
        there = self.versions()
        if there and version < there[0]:
            reason = f"it was dropped (weights.keep = {self._keep}); fetch it sooner, or keep more"
        elif version in there:
            reason = "it has a manifest, but not all of its buckets"
        elif self.shelf.near:
            reason = "it was never published"
        else:
            return WeightsError(f"version {version} is not in {self.shelf.where}: it was dropped, lost or never there")
        return WeightsError(
            f"version {version} is not in {self.shelf.where}: {reason}; versions there: {there or 'none'}"
        )


class FileWeightStore(BucketStore):
    """A store of files in a folder; see `FileShelf`."""

    def __init__(self, folder: str | Path, bucket_bytes: int, keep: int, delta: int = 0) -> None:
        super().__init__(FileShelf(folder), bucket_bytes, keep, delta)


def open_store(
    folder: str | Path,
    bucket_bytes: int,
    keep: int,
    delta: int = 0,
    mooncake: Mapping[str, Any] | None = None,
    spare: str = "",
) -> WeightStore:
    """The store of a run, from plain values. `mooncake`: arguments of `MooncakeShelf`; files are then its stand-in.

    `spare`: another folder, for files when there is no room in the first, or what is there cannot be read.
    Raises ConfigError where a package is missing.
    """
    shelf = FileShelf(folder)
    files = BucketStore(shelf, bucket_bytes, keep, delta)
    if mooncake is None and spare:
        return FallbackStore(files, FileWeightStore(spare, bucket_bytes, keep, delta), shelf.clear)
    if mooncake is None:
        return files
    from rollart.data.stores.mooncake_shelf import MooncakeShelf

    return FallbackStore(BucketStore(MooncakeShelf(**mooncake), bucket_bytes, keep, delta), files)


def _taken(held: Held | None, index: int) -> Buffer | None:
    """One of the buckets held, if there is one, which is then held no more."""
    if held is None or index >= len(held[1]):
        return None
    taken, held[1][index] = held[1][index], None
    return taken


def _summed(parts: Iterable[memoryview], running: Checksum) -> Iterator[memoryview]:
    """The parts in slices, each taken into the sum just before somebody copies it."""
    for part in parts:
        for first in range(0, part.nbytes, SLICE_BYTES):
            piece = part[first : first + SLICE_BYTES]
            running.update(piece)
            yield piece
