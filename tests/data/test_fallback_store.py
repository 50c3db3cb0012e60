"""Two stores of which the second stands in for the first: nothing is lost silently, and nothing is published twice."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rollart.data.stores.fallback import FallbackStore
from rollart.data.stores.files import FileShelf
from rollart.data.weights import BucketStore, open_store
from rollart.errors import WeightsError, WeightsLost
from tests.data.memory_shelf import MemoryShelf
from tests.data.store_contract import FilePlace, assert_holds, infos, tensors


class Pair:
    """A store that can break, and files."""

    def __init__(self, folder: Path) -> None:
        self.first, self.files = MemoryShelf(near=False), FilePlace(folder)

    def store(self) -> FallbackStore:
        return FallbackStore(BucketStore(self.first, 1024, 2), self.files.store())


@pytest.fixture
def pair(tmp_path: Path) -> Pair:
    return Pair(tmp_path)


def test_while_the_first_works_nothing_reaches_the_second(pair: Pair, tmp_path: Path) -> None:
    writer, reader = pair.store(), pair.store()
    assert writer.publish(0, tensors(1.0)).note == ""
    assert_holds(reader.fetch(0, infos()), 1.0)
    assert not reader.quick(0)
    assert list(tmp_path.iterdir()) == []


def test_when_the_first_fails_the_second_takes_over_for_good_and_says_so_once(pair: Pair) -> None:
    writer, reader = pair.store(), pair.store()
    writer.publish(0, tensors(0.0))
    pair.first.broken = "the master cannot be reached"
    with pytest.raises(WeightsLost, match="the master cannot be reached"):
        writer.publish(1, tensors(1.0))
    note = writer.rescue(1, tensors(1.0)).note
    assert "the master cannot be reached; from version 1 on, they go through files in" in note
    assert_holds(reader.fetch(1), 1.0)
    assert reader.quick(1)
    pair.first.broken = ""
    assert writer.publish(2, tensors(2.0)).note == ""
    assert pair.first.versions() == [0]
    assert_holds(reader.fetch(2), 2.0)
    assert_holds(reader.fetch(0), 0.0)


def test_a_store_that_is_full_is_one_that_fails(pair: Pair) -> None:
    pair.first.room = 3000
    writer = pair.store()
    with pytest.raises(WeightsLost, match="no room for"):
        writer.publish(0, tensors(0.0))
    assert pair.first.num_bytes == 0
    assert "no room for" in writer.rescue(0, tensors(0.0)).note
    assert_holds(pair.store().fetch(0), 0.0)


def test_a_version_that_the_first_has_lost_is_rescued_into_the_second(pair: Pair) -> None:
    writer, reader = pair.store(), pair.store()
    writer.publish(0, tensors(3.0))
    pair.first.broken = "the store node that holds it cannot be reached"
    with pytest.raises(WeightsLost, match="the store node that holds it cannot be reached"):
        reader.fetch(0)
    assert "version 0 is lost; from version 0 on, they go" in writer.rescue(0, tensors(3.0)).note
    assert_holds(reader.fetch(0, infos()), 3.0)
    assert writer.rescue(0, tensors(9.0)).version == 0
    assert_holds(reader.fetch(0), 3.0)


@pytest.mark.parametrize("damage", [None, b"other bytes"])
def test_a_bucket_that_the_first_lost_or_damaged_is_found_while_it_is_read(pair: Pair, damage: bytes | None) -> None:
    writer, reader = pair.store(), pair.store()
    key = writer.publish(0, tensors(3.0)).buckets[1].key
    if damage is None:
        del pair.first.values[0][key]
    else:
        pair.first.values[0][key] = damage
    reading = reader.fetch(0)
    next(reading)
    with pytest.raises(WeightsLost):
        list(reading)
    writer.rescue(0, tensors(3.0))
    assert_holds(reader.fetch(0), 3.0)


def test_a_folder_without_room_is_left_for_another_and_its_room_given_back(tmp_path: Path) -> None:
    memory, spare = tmp_path / "memory", tmp_path / "run" / "spare"
    writer, reader = (open_store(memory, 1024, 2, spare=str(spare)) for _ in range(2))
    for version in (0, 1, 2):
        writer.publish(version, tensors(version))
    assert reader.quick(2)
    assert not spare.exists()
    (memory / "v00000003").write_text("in the way")
    with pytest.raises(WeightsLost, match="version 3"):
        writer.publish(3, tensors(3.0))
    assert f"from version 3 on, they go through files in {spare}" in writer.rescue(3, tensors(3.0)).note
    assert_holds(reader.fetch(2, infos()), 2.0)
    assert_holds(reader.fetch(3, infos()), 3.0)
    (memory / "v00000003").unlink()
    assert writer.publish(4, tensors(4.0)).note == ""
    assert_holds(reader.fetch(4, infos()), 4.0)
    assert not [path for path in memory.rglob("*") if path.is_file()], "the room is free for others"


def test_what_was_kept_in_memory_for_the_next_version_is_given_back_too(tmp_path: Path) -> None:
    shelf = FileShelf(tmp_path, mapped=True)
    store = BucketStore(shelf, 1024, 2)
    for version in (0, 1, 2):
        store.publish(version, tensors(version))
    assert list(tmp_path.glob("spare-*"))
    shelf.clear()
    assert list(tmp_path.iterdir()) == []


def test_a_version_is_published_once_wherever_it_went(pair: Pair) -> None:
    writer = pair.store()
    writer.publish(0, tensors(0.0))
    pair.first.broken = "gone"
    with pytest.raises(WeightsError, match="version 0 is already published"):
        writer.publish(0, tensors(5.0))
    writer.rescue(1, tensors(1.0))
    with pytest.raises(WeightsError, match="version 1 is already published"):
        writer.publish(1, tensors(5.0))
    assert_holds(pair.store().fetch(1), 1.0)


def test_when_neither_takes_it_the_version_is_not_there(pair: Pair) -> None:
    pair.first.broken = "gone"
    writer = pair.store()
    twice = [("a", torch.ones(1)), ("a", torch.ones(1))]
    with pytest.raises(WeightsLost, match="gone"):
        writer.publish(0, twice)
    with pytest.raises(WeightsError, match="comes twice"):
        writer.rescue(0, twice)
    writer.rescue(0, tensors(2.0))
    assert_holds(pair.store().fetch(0), 2.0)


def test_files_alone_have_no_other_place(pair: Pair) -> None:
    with pytest.raises(WeightsError, match="there is no other place"):
        pair.files.store().rescue(0, tensors())
