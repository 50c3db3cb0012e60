"""The file store: what is published is what is fetched, or the fetch says why not."""

from __future__ import annotations

import errno
import threading

import pytest
import torch

from rollart.data.weights import FileWeightStore, in_buckets, write_file
from rollart.errors import ConfigError, WeightsError


def tensors(value=0.0):
    return [
        ("embed", torch.full((10, 10), value)),  # 400 bytes
        ("norm", torch.full((4,), value + 1)),
        ("head", torch.arange(600, dtype=torch.float32) + value),  # 2400 bytes
        ("half", torch.full((3, 2), value, dtype=torch.bfloat16)),
        ("scalar", torch.tensor(value)),
    ]


def store(folder, **changes):
    return FileWeightStore(folder, **{"bucket_bytes": 1024, "keep": 2, **changes})


def assert_holds(got, value):
    expected = tensors(value)
    assert [name for name, _ in got] == [name for name, _ in expected]
    for (_, left), (_, right) in zip(got, expected, strict=True):
        assert left.dtype == right.dtype
        assert torch.equal(left, right)


def test_what_is_published_is_fetched_in_another_store_object(tmp_path):
    manifest = store(tmp_path).publish(3, tensors(2.0))
    reader = store(tmp_path)
    assert reader.latest() == 3
    assert reader.manifest(3) == manifest
    assert_holds(reader.fetch(3), 2.0)
    assert [(info.name, info.shape, info.dtype) for info in manifest.parameters][3:] == [
        ("half", (3, 2), "bfloat16"),
        ("scalar", (), "float32"),
    ]


def test_buckets_are_bounded_and_a_large_tensor_has_its_own(tmp_path):
    manifest = store(tmp_path).publish(0, tensors())
    assert [bucket.names for bucket in manifest.buckets] == [("embed", "norm"), ("head",), ("half", "scalar")]


def test_no_tensor_gives_no_bucket():
    assert list(in_buckets([], 10)) == []


def test_a_tensor_that_is_not_contiguous_round_trips(tmp_path):
    turned = torch.arange(6.0).reshape(2, 3).T
    store(tmp_path).publish(0, [("turned", turned)])
    ((_, got),) = store(tmp_path).fetch(0)
    assert torch.equal(got, turned)


def test_a_published_version_never_changes(tmp_path):
    writer = store(tmp_path)
    writer.publish(1, tensors(1.0))
    with pytest.raises(WeightsError, match="already published"):
        writer.publish(1, tensors(9.0))
    assert_holds(writer.fetch(1), 1.0)


def test_a_name_that_comes_twice_is_refused(tmp_path):
    writer = store(tmp_path)
    with pytest.raises(WeightsError, match="'a' comes twice"):
        writer.publish(0, [("a", torch.ones(1)), ("a", torch.ones(1))])
    assert writer.latest() is None


def test_only_the_newest_versions_are_kept(tmp_path):
    writer = store(tmp_path, keep=3)
    for version in range(5):
        writer.publish(version, tensors(version))
    assert writer.versions() == [2, 3, 4]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["v00000002", "v00000003", "v00000004"]
    with pytest.raises(WeightsError, match=r"version 0 .* dropped \(weights.keep = 3\).*\[2, 3, 4\]"):
        writer.fetch(0)


def test_keeping_fewer_than_two_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="at least 2"):
        store(tmp_path, keep=1)


@pytest.mark.parametrize("damage", [lambda data: data[:-1] + b"\x01", lambda data: data[:-8], lambda _data: b""])
def test_a_damaged_bucket_is_found(tmp_path, damage):
    writer = store(tmp_path)
    writer.publish(0, tensors(3.0))
    path = tmp_path / "v00000000" / "bucket-0001.safetensors"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(WeightsError, match=r"bucket-0001.safetensors of version 0 .* damaged"):
        writer.fetch(0)


def test_a_damaged_manifest_is_found(tmp_path):
    writer = store(tmp_path)
    writer.publish(0, tensors())
    (tmp_path / "v00000000" / "manifest.json").write_bytes(b'{"version": 0')
    with pytest.raises(WeightsError, match=r"manifest of version 0 .* damaged"):
        writer.fetch(0)


def test_a_version_without_manifest_does_not_exist_and_can_be_published_again(tmp_path):
    writer = store(tmp_path)
    writer.publish(4, tensors(1.0))
    (tmp_path / "v00000004" / "manifest.json").unlink()
    assert writer.latest() is None
    with pytest.raises(WeightsError, match="never published; versions there: none"):
        writer.fetch(4)
    writer.publish(4, tensors(2.0))
    assert_holds(writer.fetch(4), 2.0)


def test_a_version_whose_bucket_vanished_says_so(tmp_path):
    writer = store(tmp_path)
    writer.publish(0, tensors())
    (tmp_path / "v00000000" / "bucket-0002.safetensors").unlink()
    with pytest.raises(WeightsError, match="not all of its buckets"):
        writer.fetch(0)


def test_a_full_disk_names_the_folder_and_sizes_and_leaves_no_version(tmp_path):
    room = [3000]

    def write(path, data):
        room[0] -= len(data)
        if room[0] < 0:
            path.write_bytes(data[:10])
            raise OSError(errno.ENOSPC, "No space left on device")
        write_file(path, data)

    store(tmp_path).publish(0, tensors(1.0))
    writer = store(tmp_path, write=write)
    with pytest.raises(WeightsError, match=rf"no room for version 1 in {tmp_path}: 1 versions .* bytes are free"):
        writer.publish(1, tensors(2.0))
    assert writer.versions() == [0]
    assert not (tmp_path / "v00000001").exists()
    assert_holds(writer.fetch(0), 1.0)
    room[0] = 10_000
    writer.publish(1, tensors(2.0))
    assert_holds(writer.fetch(1), 2.0)


def test_another_fault_of_the_disk_is_a_weights_error_too(tmp_path):
    def write(path, data):
        raise OSError(errno.EIO, "Input/output error")

    with pytest.raises(WeightsError, match=r"publishing version 0 .* Input/output error"):
        store(tmp_path, write=write).publish(0, tensors())


def test_a_concurrent_reader_gets_whole_versions_or_a_clear_error(tmp_path):
    writer, reader = store(tmp_path), store(tmp_path)
    done = threading.Event()
    seen, faults = set(), []

    def read():
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
        writer.publish(writer.latest() + 1, tensors(float(writer.latest() + 1)))
    done.set()
    thread.join()
    assert faults == []
    assert seen
