"""Stores of files and in memory keep the contract of all stores; what is particular to files stands below."""

from __future__ import annotations

import errno
import fcntl
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import pytest
import safetensors.torch
import torch

from rollart.data.stores.bucket import in_buckets, parts_of, tensors_of
from rollart.data.stores.checksum import begin, checksum
from rollart.data.stores.files import FileShelf, in_memory
from rollart.data.weights import SMALL_BYTES, BucketStore, FileWeightStore, open_store
from rollart.errors import ConfigError, WeightsError
from rollart.files import open_raw
from tests.data.store_contract import *  # noqa: F403
from tests.data.store_contract import FilePlace, MemoryPlace, Place, assert_holds, infos, shared_memory, tensors

HAVE_SHARED_MEMORY = in_memory(Path("/dev/shm"))
needs_shared_memory = pytest.mark.skipif(not HAVE_SHARED_MEMORY, reason="/dev/shm is no memory here")


@pytest.fixture(params=["files", "shared memory", "memory"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    if request.param == "files":
        yield FilePlace(tmp_path, mapped=False)
    elif request.param == "memory":
        yield MemoryPlace()
    elif not HAVE_SHARED_MEMORY:
        pytest.skip("/dev/shm is no memory here")
    else:
        with shared_memory() as folder:
            yield FilePlace(folder)


@pytest.fixture
def shared() -> Iterator[FilePlace]:
    with shared_memory() as folder:
        yield FilePlace(folder)


def test_no_tensor_gives_no_bucket() -> None:
    assert list(in_buckets([], 10)) == []


def test_keeping_fewer_than_two_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="at least 2"):
        FileWeightStore(tmp_path, bucket_bytes=1024, keep=1)


def test_the_store_of_plain_values_is_one_of_files(tmp_path: Path) -> None:
    open_store(str(tmp_path), 1024, 2, delta=2).publish(0, tensors(1.0))
    assert_holds(FileWeightStore(tmp_path, 1024, 2).fetch(0), 1.0)


def test_small_weights_are_quick_and_so_is_a_missing_version(place: Place) -> None:
    writer = place.store()
    writer.publish(0, tensors())
    writer.publish(1, [("large", torch.zeros(SMALL_BYTES, dtype=torch.int8))])
    assert [writer.quick(version) for version in (0, 1, 7)] == [True, False, True]


# ------------------------------------------------------------------------------------------------------------ the bytes
def test_the_safetensors_library_reads_a_bucket_and_its_buckets_are_read(tmp_path: Path) -> None:
    given = dict(tensors(2.5))
    place = FilePlace(tmp_path)
    key = place.store(bucket_bytes=1 << 20).publish(0, given.items()).buckets[0].key
    theirs = safetensors.torch.load(place.get(0, key))
    ours = dict(tensors_of(bytearray(safetensors.torch.save(given)), given))
    assert theirs.keys() == ours.keys() == given.keys()
    assert all(torch.equal(theirs[name], given[name]) and torch.equal(ours[name], given[name]) for name in given)


def test_data_begins_at_a_multiple_of_64_bytes() -> None:
    for size in range(1, 40):
        header, *_ = parts_of({"x" * size: torch.ones(3)})
        assert header.nbytes % 64 == 0


@pytest.mark.parametrize(
    "data",
    [b"", b"\1\0", b"\xff" * 80, b"\x02" + bytes(7) + b"[]", b"\x02" + bytes(7) + b"{}"],
)
def test_bytes_that_are_no_bucket_are_refused(data: bytes) -> None:
    with pytest.raises((ValueError, msgspec.MsgspecError)):
        list(tensors_of(bytearray(data), ("a",)))


@pytest.mark.parametrize("said", [("F32", [2], (0, 12)), ("F99", [3], (0, 12)), ("F32", [30], (0, 120))])
def test_a_header_that_does_not_fit_its_data_is_refused(said: Any) -> None:
    header = msgspec.json.encode({"a": dict(zip(("dtype", "shape", "data_offsets"), said, strict=True))})
    with pytest.raises(ValueError, match="header is wrong about 'a'"):
        list(tensors_of(bytearray(len(header).to_bytes(8, "little") + header + bytes(12)), ("a",)))


@pytest.mark.parametrize("algorithm", ["crc32", "xxh3_64"])
def test_a_checksum_is_that_of_all_bytes_however_they_come(algorithm: str, tmp_path: Path) -> None:
    if algorithm == "xxh3_64":
        pytest.importorskip("xxhash")
    running = begin(algorithm)
    for part in (b"one", b"", b"two"):
        running.update(part)
    assert running.value() == checksum(algorithm, b"onetwo") != checksum(algorithm, b"onetwO")
    BucketStore(FileShelf(tmp_path), 1024, 2, algorithm=algorithm).publish(0, tensors(4.0))
    assert_holds(FileWeightStore(tmp_path, 1024, 2).fetch(0), 4.0)


# --------------------------------------------------------------------------------------------------------------- files
def test_dropped_versions_leave_no_file(tmp_path: Path) -> None:
    writer = FilePlace(tmp_path, mapped=False).store()
    for version in range(5):
        writer.publish(version, tensors(version))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["v00000003", "v00000004"]


def test_a_version_without_manifest_does_not_exist_and_can_be_published_again(tmp_path: Path) -> None:
    writer = FileWeightStore(tmp_path, 1024, 2)
    writer.publish(4, tensors(1.0))
    (tmp_path / "v00000004" / "manifest.json").unlink()
    assert writer.latest() is None
    with pytest.raises(WeightsError, match="never published; versions there: none"):
        writer.fetch(4)
    writer.publish(4, tensors(2.0))
    assert_holds(writer.fetch(4), 2.0)


class Disk:
    """Opens files on a disk with so much room; a write beyond it fails half done."""

    def __init__(self, room: int, code: int = errno.ENOSPC) -> None:
        self.room, self.code = room, code

    def __call__(self, path: Path, mode: str) -> BinaryIO:
        return _LimitedFile(open_raw(path, mode), self)  # type: ignore[return-value]


class _LimitedFile:
    def __init__(self, file: BinaryIO, disk: Disk) -> None:
        self.file, self.disk = file, disk

    def __enter__(self) -> _LimitedFile:
        return self

    def __exit__(self, *_error: object) -> None:
        self.file.close()

    def write(self, data: memoryview) -> int:
        self.disk.room -= len(data)
        if self.disk.room < 0:
            self.file.write(data[:10])
            raise OSError(self.disk.code, "No space left on device")
        return self.file.write(data)


def test_a_full_disk_names_the_folder_and_sizes_and_leaves_no_version(tmp_path: Path) -> None:
    FileWeightStore(tmp_path, 1024, 2).publish(0, tensors(1.0))
    disk = Disk(3000)
    writer = BucketStore(FileShelf(tmp_path, opener=disk), 1024, 2)
    with pytest.raises(WeightsError, match=rf"no room for version 1 in {tmp_path}: 1 versions .* bytes are free"):
        writer.publish(1, tensors(2.0))
    assert writer.versions() == [0]
    assert not (tmp_path / "v00000001").exists()
    assert_holds(writer.fetch(0), 1.0)
    disk.room = 10_000
    writer.publish(1, tensors(2.0))
    assert_holds(writer.fetch(1), 2.0)


def test_another_fault_of_the_disk_is_a_weights_error_too(tmp_path: Path) -> None:
    writer = BucketStore(FileShelf(tmp_path, opener=Disk(0, errno.EIO)), 1024, 2)
    with pytest.raises(WeightsError, match=r"publishing version 0 .* No space left on device"):
        writer.publish(0, tensors())


@needs_shared_memory
def test_in_shared_memory_a_bucket_is_mapped_and_a_dropped_file_is_written_over(shared: FilePlace) -> None:
    writer = shared.store(keep=2)
    first = writer.publish(0, tensors(0.0)).buckets[1].key
    inode = shared.path(0, first).stat().st_ino
    for version in (1, 2, 3):
        writer.publish(version, tensors(version))
    assert shared.path(3, first).stat().st_ino == inode
    assert_holds(shared.store().fetch(3), 3.0)


@needs_shared_memory
def test_a_file_that_somebody_reads_is_not_written_over(shared: FilePlace) -> None:
    writer = shared.store(keep=2)
    first = writer.publish(0, tensors(0.0)).buckets[1].key
    inode = shared.path(0, first).stat().st_ino
    reading = shared.store().fetch(0)
    head = [next(reading) for _ in range(3)][2]
    reading.close()  # type: ignore[attr-defined]
    for version in (1, 2, 3):
        writer.publish(version, tensors(version))
    assert shared.path(3, first).stat().st_ino != inode
    assert torch.equal(head[1], tensors(0.0)[2][1])


@needs_shared_memory
def test_a_file_of_a_version_that_is_being_dropped_is_not_read(shared: FilePlace) -> None:
    key = shared.store().publish(0, tensors()).buckets[0].key
    with shared.path(0, key).open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(WeightsError, match="not all of its buckets"):
            list(shared.store().fetch(0))
    assert_holds(shared.store().fetch(0, infos()), 0.0)


def test_a_folder_on_disk_is_not_memory(tmp_path: Path) -> None:
    assert in_memory(Path("/proc/self")) is False
    assert in_memory(tmp_path / "not" / "there") == in_memory(tmp_path)


def test_a_concurrent_reader_gets_whole_versions_or_a_clear_error(place: Place) -> None:
    writer, reader = place.store(), place.store()
    done = threading.Event()
    seen: set[int] = set()
    faults: list[Exception] = []

    def read() -> None:
        while not done.is_set():
            version = reader.latest()
            if version is None:
                continue
            try:
                assert_holds(reader.fetch(version), float(version))
                seen.add(version)
            except WeightsError as error:
                if "dropped" not in str(error):
                    faults.append(error)
            except Exception as error:
                faults.append(error)

    thread = threading.Thread(target=read)
    thread.start()
    for version in range(60):
        writer.publish(version, tensors(float(version)))
    while not seen and not faults and thread.is_alive():
        latest = (writer.latest() or 0) + 1
        writer.publish(latest, tensors(float(latest)))
    done.set()
    thread.join()
    assert faults == []
    assert seen
