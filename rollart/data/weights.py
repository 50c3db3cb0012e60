"""Versions of the weights as files, for one writer and any number of readers in other processes.

    FOLDER/v00000007/bucket-0000.safetensors ...   each written under another name, then renamed
    FOLDER/v00000007/manifest.json                 renamed into place last: from then on the version exists

Invariants: a published version never changes; the newest `keep` versions are there; whatever `fetch` returns has
passed its checksums. Removal drops the manifest first, so a reader that comes too late is told so.
What this file leaves out: where the folder lies (`data/weights_folder.py`), other transports.
"""

from __future__ import annotations

import errno
import shutil
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import msgspec
import safetensors.torch
from torch import Tensor

from rollart.errors import ConfigError, WeightsError, boundary
from rollart.types import Bucket, ParameterInfo, WeightManifest

MANIFEST = "manifest.json"
Write = Callable[[Path, bytes], None]


def write_file(path: Path, data: bytes) -> None:
    """Write under another name and rename. No fsync: the folder is in shared memory, or lost with its run."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_bytes(data)
    temporary.replace(path)


class FileWeightStore:
    """Implements `protocols.WeightStore` in a folder.

    `bucket_bytes`: a bucket is closed before it grows beyond this; a larger tensor has one of its own.
    `keep`: versions kept, at least 2, so that the one being read is not the one dropped.
    `write`: how a file is written.
    """

    def __init__(self, folder: str | Path, bucket_bytes: int, keep: int, write: Write = write_file) -> None:
        if keep < 2:
            raise ConfigError(f"weights.keep: {keep} would drop the version that engines are reading; take at least 2")
        self.folder = Path(folder)
        self._bucket_bytes = bucket_bytes
        self._keep = keep
        self._write = write

    # --------------------------------------------------------------------------------------------------------- writing
    def publish(self, version: int, tensors: Iterable[tuple[str, Tensor]]) -> WeightManifest:
        """Write buckets, then the manifest; drop versions beyond the number kept.

        Raises WeightsError when the version exists, a name comes twice, or the disk is full; then the version does
        not exist.
        """
        place = self._place(version)
        if (place / MANIFEST).exists():
            raise WeightsError(f"version {version} is already published in {self.folder} and cannot change")
        try:
            with boundary(WeightsError, f"publishing version {version} in {self.folder}"):
                shutil.rmtree(place, ignore_errors=True)  # what a publisher that died left behind
                place.mkdir(parents=True)
                manifest = self._write_version(version, place, tensors)
        except WeightsError as error:
            shutil.rmtree(place, ignore_errors=True)
            raise self._explained(error, version) from error
        for old in self.versions()[: -self._keep]:
            self._drop(old)
        return manifest

    def _write_version(self, version: int, place: Path, tensors: Iterable[tuple[str, Tensor]]) -> WeightManifest:
        buckets: list[Bucket] = []
        parameters: list[ParameterInfo] = []
        names: set[str] = set()
        for group in in_buckets(tensors, self._bucket_bytes):
            twice = names.intersection(group)
            if twice:
                raise WeightsError(f"parameter {min(twice)!r} comes twice")
            names.update(group)
            data = safetensors.torch.save({name: tensor.contiguous() for name, tensor in group.items()})
            key = f"bucket-{len(buckets):04d}.safetensors"
            self._write(place / key, data)
            buckets.append(Bucket(key, len(data), zlib.crc32(data), tuple(group)))
            parameters += [
                ParameterInfo(name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
                for name, tensor in group.items()
            ]
        manifest = WeightManifest(version, tuple(buckets), tuple(parameters))
        self._write(place / MANIFEST, msgspec.json.encode(manifest))
        return manifest

    def _explained(self, error: WeightsError, version: int) -> WeightsError:
        cause = error.__cause__
        if not isinstance(cause, OSError) or cause.errno not in (errno.ENOSPC, errno.EDQUOT):
            return error
        kept = self.versions()
        held = sum(self.num_bytes(old) for old in kept)
        free = shutil.disk_usage(self.folder).free
        return WeightsError(
            f"no room for version {version} in {self.folder}: {len(kept)} versions there take {held:,} bytes, "
            f"{free:,} bytes are free; free some space, lower weights.keep, or choose another folder"
        )

    def _drop(self, version: int) -> None:
        (self._place(version) / MANIFEST).unlink(missing_ok=True)
        shutil.rmtree(self._place(version), ignore_errors=True)

    # --------------------------------------------------------------------------------------------------------- reading
    def fetch(self, version: int) -> list[tuple[str, Tensor]]:
        """Read and verify one version, in the order published. Raises WeightsError when missing or damaged."""
        manifest = self.manifest(version)
        return [pair for bucket in manifest.buckets for pair in self._read_bucket(version, bucket)]

    def manifest(self, version: int) -> WeightManifest:
        """What a version consists of. Raises WeightsError."""
        try:
            data = (self._place(version) / MANIFEST).read_bytes()
        except FileNotFoundError:
            raise self._missing(version) from None
        with boundary(WeightsError, f"manifest of version {version} in {self.folder} is damaged"):
            return msgspec.json.decode(data, type=WeightManifest)

    def num_bytes(self, version: int) -> int:
        """Size of a version's buckets; 0 when it is not there."""
        try:
            return sum(bucket.num_bytes for bucket in self.manifest(version).buckets)
        except WeightsError:
            return 0

    def latest(self) -> int | None:
        """The newest published version."""
        return max(self.versions(), default=None)

    def versions(self) -> list[int]:
        """All published versions, oldest first."""
        return sorted(int(path.parent.name[1:]) for path in self.folder.glob(f"v[0-9]*/{MANIFEST}"))

    def _read_bucket(self, version: int, bucket: Bucket) -> Iterator[tuple[str, Tensor]]:
        try:
            data = (self._place(version) / bucket.key).read_bytes()
        except FileNotFoundError:
            raise self._missing(version) from None
        if len(data) != bucket.num_bytes or zlib.crc32(data) != bucket.checksum:
            raise WeightsError(
                f"{bucket.key} of version {version} in {self.folder} is damaged: {len(data)} bytes with checksum "
                f"{zlib.crc32(data)}, published were {bucket.num_bytes} bytes with {bucket.checksum}"
            )
        tensors = safetensors.torch.load(data)
        return ((name, tensors[name]) for name in bucket.names)

    def _missing(self, version: int) -> WeightsError:
        there = self.versions()
        if there and version < there[0]:
            reason = f"it was dropped (weights.keep = {self._keep}); fetch it sooner, or keep more"
        elif (self._place(version) / MANIFEST).exists():
            reason = "it has a manifest, but not all of its buckets"
        else:
            reason = "it was never published"
        return WeightsError(f"version {version} is not in {self.folder}: {reason}; versions there: {there or 'none'}")

    def _place(self, version: int) -> Path:
        return self.folder / f"v{version:08d}"


def in_buckets(tensors: Iterable[tuple[str, Tensor]], bucket_bytes: int) -> Iterator[dict[str, Tensor]]:
    """Group tensors in their order into buckets of at most `bucket_bytes`; a larger tensor stands alone."""
    bucket: dict[str, Tensor] = {}
    size = 0
    for name, tensor in tensors:
        if bucket and (size + tensor.nbytes > bucket_bytes or name in bucket):
            yield bucket
            bucket, size = {}, 0
        bucket[name] = tensor
        size += tensor.nbytes
    if bucket:
        yield bucket
