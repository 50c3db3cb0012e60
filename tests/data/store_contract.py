"""What every weight store must do, as tests over a fixture `place` that the importing module defines."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import msgspec
import pytest
import torch
from torch import Tensor

from rollart.data.stores.bucket import TAGS
from rollart.data.weights import BucketStore
from rollart.errors import WeightsError
from rollart.types import ParameterInfo, WeightManifest
from tests.data.memory_shelf import MemoryShelf

Pairs = list[tuple[str, Tensor]]


class Place(Protocol):
    """Where versions lie, and a way to do damage there."""

    def store(self, **changes: Any) -> BucketStore:
        """One more store object on the same place, as another process has one."""
        ...

    def get(self, version: int, key: str) -> bytes: ...

    def put(self, version: int, key: str, data: bytes | None) -> None:
        """Other bytes under a key; None removes it. Key "manifest" is the manifest."""
        ...


def tensors(number: float = 0.0) -> Pairs:
    value = float(number)
    return [
        ("embed", torch.full((10, 10), value)),  # 400 bytes
        ("norm", torch.full((4,), value + 1)),
        ("head", torch.arange(600, dtype=torch.float32) + value),  # 2400 bytes
        ("half", torch.full((3, 2), value, dtype=torch.bfloat16)),
        ("scalar", torch.tensor(value)),
    ]


def infos(value: float = 0.0) -> list[ParameterInfo]:
    return [ParameterInfo(name, tuple(t.shape), str(t.dtype)[6:]) for name, t in tensors(value)]


def assert_equal(got: Pairs, expected: Pairs) -> None:
    assert [name for name, _ in got] == [name for name, _ in expected]
    for (_, left), (_, right) in zip(got, expected, strict=True):
        assert (left.dtype, left.shape) == (right.dtype, right.shape)
        assert torch.equal(left, right)


def assert_holds(got: Iterator[tuple[str, Tensor]] | Pairs, value: float) -> None:
    assert_equal(list(got), tensors(value))


def change_manifest(place: Place, version: int, change: Callable[[dict[str, Any]], Any]) -> None:
    said = msgspec.json.decode(place.get(version, "manifest"))
    change(said)
    place.put(version, "manifest", msgspec.json.encode(said))


# -------------------------------------------------------------------------------------------------- publish and fetch
def test_what_is_published_is_fetched_in_another_store_object(place: Place) -> None:
    manifest = place.store().publish(3, tensors(2.0))
    reader = place.store()
    assert reader.manifest(3) == manifest
    assert_holds(reader.fetch(3), 2.0)
    assert_holds(reader.fetch(3, infos()), 2.0)
    assert [(info.name, info.shape, info.dtype) for info in manifest.parameters][3:] == [
        ("half", (3, 2), "bfloat16"),
        ("scalar", (), "float32"),
    ]


def test_buckets_are_bounded_and_a_large_tensor_has_its_own(place: Place) -> None:
    manifest = place.store().publish(0, tensors())
    assert [bucket.names for bucket in manifest.buckets] == [("embed", "norm"), ("head",), ("half", "scalar")]


@pytest.mark.parametrize("dtype", sorted(TAGS, key=str))
def test_every_dtype_round_trips_bit_for_bit(place: Place, dtype: torch.dtype) -> None:
    bits = torch.randint(0, 2 if dtype == torch.bool else 256, (3, 7 * dtype.itemsize), dtype=torch.uint8)
    given = [("odd", torch.ones(3, dtype=torch.int8)), ("values", bits.view(dtype)), ("none", torch.empty(0, 4))]
    place.store().publish(0, given)
    (_, odd), (_, values), (_, none) = place.store().fetch(0)
    assert torch.equal(odd, torch.ones(3, dtype=torch.int8))
    assert values.dtype == dtype
    assert torch.equal(values.contiguous().view(torch.uint8), bits)
    assert none.shape == (0, 4)


def test_a_dtype_that_the_format_lacks_is_refused(place: Place) -> None:
    with pytest.raises(WeightsError, match=r"parameter 'c' is of torch.complex64"):
        place.store().publish(0, [("c", torch.ones(1, dtype=torch.complex64))])


def test_a_tensor_that_is_not_contiguous_round_trips(place: Place) -> None:
    turned = torch.arange(6.0).reshape(2, 3).T
    place.store().publish(0, [("turned", turned)])
    ((_, got),) = place.store().fetch(0)
    assert torch.equal(got, turned)


def test_a_model_without_parameters_is_a_version_too(place: Place) -> None:
    place.store().publish(0, [])
    assert list(place.store().fetch(0, [])) == []


def test_a_published_version_never_changes(place: Place) -> None:
    writer = place.store()
    writer.publish(1, tensors(1.0))
    with pytest.raises(WeightsError, match="already published"):
        writer.publish(1, tensors(9.0))
    assert_holds(place.store().fetch(1), 1.0)


def test_a_name_that_comes_twice_is_refused(place: Place) -> None:
    writer = place.store()
    with pytest.raises(WeightsError, match="'a' comes twice"):
        writer.publish(0, [("a", torch.ones(1)), ("a", torch.ones(1))])
    assert writer.latest() is None


def test_a_version_whose_tensors_fail_is_not_there_and_can_be_published_again(place: Place) -> None:
    def failing() -> Iterator[tuple[str, Tensor]]:
        yield from tensors()[:4]
        raise ZeroDivisionError("a fault in the trainer")

    writer = place.store()
    with pytest.raises(WeightsError, match=r"publishing version 2 .*ZeroDivisionError: a fault in the trainer"):
        writer.publish(2, failing())
    with pytest.raises(WeightsError, match="version 2 is not in"):
        place.store().fetch(2)
    writer.publish(2, tensors(2.0))
    assert_holds(place.store().fetch(2), 2.0)


def test_only_the_newest_versions_are_kept(place: Place) -> None:
    writer = place.store(keep=3)
    for version in range(5):
        writer.publish(version, tensors(version))
    assert writer.versions() == [2, 3, 4]
    with pytest.raises(WeightsError, match=r"version 0 .* dropped \(weights.keep = 3\).*\[2, 3, 4\]"):
        writer.fetch(0)
    with pytest.raises(WeightsError, match="version 1 is not in"):
        place.store().fetch(1)
    assert_holds(place.store().fetch(2), 2.0)


# ------------------------------------------------------------------------------------------------------------- damage
@pytest.mark.parametrize("damage", [lambda data: data[:-1] + b"\x01", lambda data: data[:-8], lambda _data: b"\0"])
def test_a_damaged_bucket_is_found_before_anything_of_it_is_given_out(
    place: Place, damage: Callable[[bytes], bytes]
) -> None:
    key = place.store().publish(0, tensors(3.0)).buckets[1].key
    place.put(0, key, damage(place.get(0, key)))
    reading = place.store().fetch(0)
    assert_equal([next(reading), next(reading)], tensors(3.0)[:2])
    with pytest.raises(WeightsError, match=f"{key} of version 0 .* damaged"):
        next(reading)


def test_a_bucket_that_vanished_is_missed(place: Place) -> None:
    key = place.store().publish(0, tensors()).buckets[2].key
    place.put(0, key, None)
    with pytest.raises(WeightsError, match=r"version 0 is not in .*(not all of its buckets|dropped, lost)"):
        list(place.store().fetch(0))


def test_a_damaged_manifest_is_found(place: Place) -> None:
    place.store().publish(0, tensors())
    place.put(0, "manifest", place.get(0, "manifest")[:-20])
    with pytest.raises(WeightsError, match=r"manifest of version 0 .* damaged"):
        place.store().fetch(0)


def test_the_manifest_of_another_version_is_found(place: Place) -> None:
    place.store().publish(1, tensors())
    change_manifest(place, 1, lambda said: said.update(version=2))
    with pytest.raises(WeightsError, match=r"manifest of version 1 .* damaged.*it says version 2"):
        place.store().fetch(1)


def test_buckets_that_were_exchanged_are_found(place: Place) -> None:
    first, _, last = place.store().publish(0, tensors()).buckets
    one, other = place.get(0, first.key), place.get(0, last.key)
    place.put(0, first.key, other)
    place.put(0, last.key, one)
    with pytest.raises(WeightsError, match="damaged"):
        list(place.store().fetch(0))


def test_a_checksum_of_an_unknown_kind_is_refused(place: Place) -> None:
    place.store().publish(0, tensors())
    change_manifest(place, 0, lambda said: said.update(checksums="parity"))
    with pytest.raises(WeightsError, match="checksums of kind 'parity' are unknown"):
        list(place.store().fetch(0))


def test_weights_of_another_model_are_refused_with_the_first_difference(place: Place) -> None:
    place.store().publish(0, tensors())
    reader = place.store()
    with pytest.raises(WeightsError, match=r"another model .*: head float32\[600\] is there alone"):
        reader.fetch(0, [*infos()[:2], ParameterInfo("head", (600,), "bfloat16"), *infos()[3:]])
    with pytest.raises(WeightsError, match=r"another model .*: scalar float32\[\] is there alone"):
        reader.fetch(0, infos()[:-1])
    assert_holds(reader.fetch(0, infos()[::-1]), 0.0)


def test_a_manifest_that_only_claims_to_be_of_this_model_is_refused(place: Place) -> None:
    place.store().publish(0, tensors())
    change_manifest(place, 0, lambda said: said["parameters"][2].update(shape=[300]))
    with pytest.raises(WeightsError, match="another model"):
        place.store().fetch(0, infos())


# ---------------------------------------------------------------------------------------------------- readers and drop
def test_a_reader_keeps_its_tensors_when_their_version_is_dropped_and_its_memory_reused(place: Place) -> None:
    writer = place.store(keep=2)
    writer.publish(0, tensors(0.0))
    held = list(place.store().fetch(0))
    for version in range(1, 8):
        writer.publish(version, tensors(version))
    assert_holds(held, 0.0)
    assert_holds(place.store().fetch(7), 7.0)


def test_what_a_reader_writes_into_its_tensors_stays_with_it(place: Place) -> None:
    place.store().publish(0, tensors(1.0))
    for _, tensor in place.store().fetch(0):
        tensor.zero_()
    assert_holds(place.store().fetch(0), 1.0)


def test_a_reader_overtaken_in_the_middle_is_told_so(place: Place) -> None:
    writer = place.store(keep=2)
    writer.publish(0, tensors(0.0))
    reading = place.store().fetch(0)
    next(reading)
    for version in (1, 2, 3):
        writer.publish(version, tensors(version))
    with pytest.raises(WeightsError, match=r"version 0 is not in .* dropped"):
        list(reading)


# ------------------------------------------------------------------------------------------------------------- deltas
def changed(value: float, version: int) -> Pairs:
    """As `tensors`, one element of the head other in each version."""
    made = tensors(value)
    made[2][1][version] += 1.0
    return made


def sealed(place: Place, num: int, **changes: Any) -> list[WeightManifest]:
    writer = place.store(delta=4, keep=8, **changes)
    return [writer.publish(version, changed(0.0, version)) for version in range(num)]


def test_between_whole_versions_only_what_changed_is_stored(place: Place) -> None:
    manifests = sealed(place, 6)
    assert [manifest.base for manifest in manifests] == [None, 0, 1, 2, None, 4]
    whole, change = manifests[0].buckets, manifests[1].buckets
    assert not any(bucket.delta for bucket in whole)
    assert [(bucket.delta, bucket.stored_bytes > 0) for bucket in change] == [
        (True, False),
        (True, True),
        (True, False),
    ]
    assert change[1].stored_bytes < whole[1].num_bytes / 4
    assert [bucket.num_bytes for bucket in change] == [bucket.num_bytes for bucket in whole]


@pytest.mark.parametrize("stops", [[5], [3], [0, 1, 2, 3, 4, 5], [1, 3], [3, 1, 2], [2, 2, 5, 0]])
def test_a_reader_gets_every_version_whatever_it_read_before(place: Place, stops: list[int]) -> None:
    sealed(place, 6)
    reader = place.store(delta=4)
    for version in stops:
        assert_equal(list(reader.fetch(version, infos())), changed(0.0, version))


def test_a_damaged_difference_is_found_and_what_is_held_stays_good(place: Place) -> None:
    manifests = sealed(place, 4)
    key = manifests[2].buckets[1].key
    place.put(2, key, place.get(2, key)[:-3] + b"abc")
    reader = place.store(delta=4)
    assert_equal(list(reader.fetch(1)), changed(0.0, 1))
    for version in (2, 3):
        with pytest.raises(WeightsError, match=rf"version {version} in .* damaged"):
            list(reader.fetch(version))
    assert_equal(list(reader.fetch(0)), changed(0.0, 0))


def test_a_base_that_was_changed_in_the_readers_hands_is_read_anew(place: Place) -> None:
    sealed(place, 3)
    reader = place.store(delta=4)
    for _, tensor in reader.fetch(1):
        tensor.zero_()
    assert_equal(list(reader.fetch(2)), changed(0.0, 2))


def test_what_differences_need_is_kept_and_the_rest_dropped(place: Place) -> None:
    writer = place.store(delta=5, keep=2)
    for version in range(8):
        writer.publish(version, changed(0.0, version))
        if version == 4:
            assert writer.versions() == [0, 1, 2, 3, 4]
    assert writer.versions() == [5, 6, 7]
    assert_equal(list(place.store(delta=5).fetch(7)), changed(0.0, 7))


def test_a_publication_that_failed_is_followed_by_a_whole_version(place: Place) -> None:
    writer = place.store(delta=8)
    writer.publish(0, tensors(0.0))
    with pytest.raises(WeightsError, match="comes twice"):
        writer.publish(1, [*tensors(9.0), *tensors(9.0)])
    assert writer.publish(1, tensors(1.0)).base is None
    assert writer.publish(2, tensors(1.0)).base == 1
    assert_holds(place.store(delta=8).fetch(2), 1.0)


def test_a_model_that_grew_is_written_whole_where_it_grew(place: Place) -> None:
    writer = place.store(delta=8)
    writer.publish(0, tensors(0.0))
    larger = [*tensors(0.0), ("more", torch.ones(600))]
    writer.publish(1, larger)
    writer.publish(2, larger)
    assert_equal(list(place.store(delta=8).fetch(2)), larger)


# -------------------------------------------------------------------------------------------------------- other places
class FilePlace:
    """A folder; `mapped` as `FileShelf` has it."""

    def __init__(self, folder: Path, mapped: bool | None = None) -> None:
        self.folder, self.mapped = folder, mapped

    def store(self, **changes: Any) -> BucketStore:
        from rollart.data.stores.files import FileShelf

        options = {"bucket_bytes": 1024, "keep": 2, **changes}
        return BucketStore(FileShelf(self.folder, self.mapped), **options)

    def path(self, version: int, key: str) -> Path:
        return self.folder / f"v{version:08d}" / ("manifest.json" if key == "manifest" else key)

    def get(self, version: int, key: str) -> bytes:
        return self.path(version, key).read_bytes()

    def put(self, version: int, key: str, data: bytes | None) -> None:
        path = self.path(version, key)
        path.unlink()
        if data is not None:
            path.write_bytes(data)


class MemoryPlace:
    """A `MemoryShelf`."""

    def __init__(self) -> None:
        self.shelf = MemoryShelf()

    def store(self, **changes: Any) -> BucketStore:
        return BucketStore(self.shelf, **{"bucket_bytes": 1024, "keep": 2, **changes})

    def get(self, version: int, key: str) -> bytes:
        return self.shelf.manifests[version] if key == "manifest" else self.shelf.values[version][key]

    def put(self, version: int, key: str, data: bytes | None) -> None:
        if key == "manifest":
            assert data is not None
            self.shelf.manifests[version] = data
        elif data is None:
            del self.shelf.values[version][key]
        else:
            self.shelf.values[version][key] = data


@contextmanager
def shared_memory() -> Iterator[Path]:
    """A folder in memory, gone afterwards."""
    import tempfile

    with tempfile.TemporaryDirectory(prefix="rollart-test-", dir="/dev/shm") as folder:
        yield Path(folder)
