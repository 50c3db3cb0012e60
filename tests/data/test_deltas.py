"""Differences between versions are exact, whatever changes and whoever reads what; damage never gets through."""

from __future__ import annotations

import random
import zlib

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollart.data.stores.delta import BLOCK_BYTES, WIDTHS, Codec, Difference, applied, difference
from rollart.data.weights import BucketStore
from rollart.errors import WeightsError
from tests.data.memory_shelf import MemoryShelf

CODECS: list[Codec] = ["zlib", "zstd"]


@pytest.fixture(params=CODECS)
def codec(request: pytest.FixtureRequest) -> Codec:
    if request.param == "zstd":
        pytest.importorskip("zstandard")
    return request.param  # type: ignore[no-any-return]


@pytest.mark.parametrize("size", [0, 1, 7, BLOCK_BYTES - 1, BLOCK_BYTES, BLOCK_BYTES + 1, 5 * BLOCK_BYTES + 3])
@pytest.mark.parametrize("width", WIDTHS)
def test_a_difference_turns_the_one_into_the_other(size: int, width: int, codec: Codec) -> None:
    draw = random.Random(size)
    base = draw.randbytes(size)
    assert difference(base, base, width, codec) is None
    for count in (1, size // 2, size):
        new = bytearray(base)
        for place in draw.sample(range(size), count) if size else ():
            new[place] ^= draw.randrange(1, 256)
        change = difference(base, bytes(new), width, codec)
        assert (change is None) == (base == new)
        if change is not None:
            assert applied(base, change) == new


def test_the_base_stays_as_it_was(codec: Codec) -> None:
    base = bytearray(range(200))
    change = difference(base, bytes(200), 4, codec)
    assert change is not None
    assert applied(base, change) == bytes(200)
    assert base == bytearray(range(200))


def test_small_steps_of_floats_take_little_room(codec: Codec) -> None:
    draw = np.random.default_rng(0)
    base = draw.normal(size=50_000).astype(np.float32)
    new = (base + 1e-4 * draw.normal(size=base.size)).astype(np.float32)
    change = difference(base, new, 4, codec)
    assert change is not None
    assert len(change) < 0.8 * base.nbytes
    assert applied(base, change) == new.tobytes()


@settings(max_examples=200)
@given(st.data())
def test_a_damaged_difference_raises_or_gives_other_bytes_never_a_crash(data: st.DataObject) -> None:
    base, new = bytes(3 * BLOCK_BYTES), bytes(BLOCK_BYTES) + b"new" * 3000 + bytes(3 * BLOCK_BYTES)
    change = bytearray(difference(base, new[: len(base)], 2) or b"")
    place = data.draw(st.integers(0, len(change) - 1))
    change[place] ^= data.draw(st.integers(1, 255))
    try:
        got = applied(base, bytes(change))
    except Exception:
        return
    assert len(got) == len(base)


def test_a_payload_that_swells_is_refused(codec: Codec) -> None:
    base = bytes(BLOCK_BYTES)
    change = difference(base, b"\1" * BLOCK_BYTES, 1, codec)
    assert change is not None
    swelling = bytes(100 * BLOCK_BYTES)
    payload = zlib.compress(swelling) if codec == "zlib" else pytest.importorskip("zstandard").compress(swelling)
    bomb = Difference(BLOCK_BYTES, BLOCK_BYTES, 1, codec, b"\x80", payload)
    with pytest.raises(ValueError, match="are not 4096 bytes long"):
        applied(base, msgspec.msgpack.encode(bomb))


# --------------------------------------------------------------------------------------------------------------- chains
SHAPES = {"embed": (40, 30), "norm": (7,), "head": (2000,), "odd": (3,)}


class Writer:
    """Publishes versions of a small model; each differs from the one before by what a seed says."""

    def __init__(self, shelf: MemoryShelf, delta: int, keep: int) -> None:
        self.store = BucketStore(shelf, 4096, keep, delta)
        self.now = {name: torch.zeros(shape, dtype=torch.int32) for name, shape in SHAPES.items()}
        self.past: list[dict[str, torch.Tensor]] = []

    def publish(self, seed: int) -> None:
        draw = random.Random(seed)
        for tensor in self.now.values():
            flat = tensor.view(-1)
            for _ in range(draw.choice([0, 0, 1, 3, flat.numel()])):
                flat[draw.randrange(flat.numel())] = draw.randrange(-(2**31), 2**31)
        self.past.append({name: tensor.clone() for name, tensor in self.now.items()})
        self.store.publish(len(self.past) - 1, self.now.items())


@settings(max_examples=60)
@given(st.data())
def test_readers_at_random_places_of_random_chains_get_exactly_what_was_published(data: st.DataObject) -> None:
    shelf, num_deltas, keep = MemoryShelf(), data.draw(st.integers(0, 6)), data.draw(st.integers(2, 5))
    writer = Writer(shelf, num_deltas, keep)
    readers = [BucketStore(shelf, 4096, keep, num_deltas) for _ in range(3)]
    for seed in data.draw(st.lists(st.integers(0, 10**6), min_size=1, max_size=14)):
        writer.publish(seed)
        there = shelf.versions()
        assert there[-keep:] == list(range(len(writer.past)))[-keep:]
        assert len(there) <= keep + max(0, num_deltas - 1)
        for reader in data.draw(st.lists(st.sampled_from(readers), max_size=3)):
            version = data.draw(st.sampled_from(there))
            got = dict(reader.fetch(version))
            assert got.keys() == SHAPES.keys()
            assert all(torch.equal(got[name], writer.past[version][name]) for name in SHAPES)


@settings(max_examples=60)
@given(st.data())
def test_any_flipped_bit_of_a_chain_is_found_by_whoever_reads_through_it(data: st.DataObject) -> None:
    shelf = MemoryShelf()
    writer = Writer(shelf, 4, 5)
    for seed in range(4):
        writer.publish(data.draw(st.integers(0, 10**6)) + seed)
    keys = [(version, key) for version, held in shelf.values.items() for key in held]
    version, key = data.draw(st.sampled_from(keys))
    damaged = bytearray(shelf.values[version][key])
    damaged[data.draw(st.integers(0, len(damaged) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    shelf.values[version][key] = bytes(damaged)
    for wanted in range(4):
        try:
            got = dict(BucketStore(shelf, 4096, 5, 4).fetch(wanted))
        except WeightsError:
            continue
        assert all(torch.equal(got[name], writer.past[wanted][name]) for name in SHAPES)
