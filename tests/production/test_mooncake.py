"""The real Mooncake store over TCP: the contract of all stores, and what becomes of it when its processes die.

Needs `mooncake-transfer-engine-non-cuda` and, on Debian, libibverbs1, librdmacm1 and libnuma1.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from rollart.config import parse
from rollart.data.stores.fallback import FallbackStore
from rollart.data.stores.mooncake_service import mooncake_store
from rollart.data.stores.mooncake_shelf import connect
from rollart.data.weights import BucketStore, FileWeightStore, open_store
from rollart.errors import WeightsError, WeightsLost
from rollart.sections import WeightsConfig
from tests.data.store_contract import *  # noqa: F403
from tests.data.store_contract import Place, assert_holds, infos, tensors
from tests.production.mooncake_processes import PATIENCE_S, Store

REASON = "mooncake, or a library that it needs, is not installed; run them with: make test-production"
pytest.importorskip("mooncake.store", reason=REASON, exc_type=ImportError)
pytestmark = [pytest.mark.timeout(300), pytest.mark.filterwarnings("default")]

SEGMENT_BYTES = 64 << 20
PREFIXES = itertools.count()


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    """A store that nobody kills."""
    store = Store(tmp_path_factory.mktemp("mooncake"), SEGMENT_BYTES)
    yield store
    store.close()


@pytest.fixture
def mortal(tmp_path: Path) -> Iterator[Store]:
    """A store of one test."""
    store = Store(tmp_path / "logs", SEGMENT_BYTES)
    yield store
    store.close()


@pytest.fixture(scope="module")
def client(running: Store) -> Any:
    """One for all tests of the contract, as it takes long to connect and to leave."""
    return connect(running.address, "tcp", 0, 16 << 20)


class MooncakePlace:
    """A prefix of its own in a running store."""

    def __init__(self, running: Store, client: Any) -> None:
        self.running, self.client, self.prefix = running, client, f"contract-{next(PREFIXES)}"
        self.shelf = running.shelf(self.prefix, client=client)

    def store(self, **changes: Any) -> BucketStore:
        shelf = self.running.shelf(self.prefix, client=self.client)
        return BucketStore(shelf, **{"bucket_bytes": 1024, "keep": 2, **changes})

    def get(self, version: int, key: str) -> bytes:
        data = self.shelf.manifest(version) if key == "manifest" else self.shelf.read(version, key, 1 << 20)
        assert data is not None
        return bytes(data)

    def put(self, version: int, key: str, data: bytes | None) -> None:
        self.shelf.remove(version, key)
        if data is not None:
            self.shelf.write(version, key, len(data), [memoryview(data)])


@pytest.fixture
def place(running: Store, client: Any) -> Place:
    return MooncakePlace(running, client)


def test_a_version_is_read_by_a_client_of_its_own(running: Store) -> None:
    running.buckets("two").publish(0, tensors(6.0))
    assert_holds(running.buckets("two").fetch(0, infos()), 6.0)


# ---------------------------------------------------------------------------------------------------------- the store
def test_the_death_of_the_writer_loses_nothing(running: Store, tmp_path: Path) -> None:
    code = (
        "import os, signal, torch\n"
        "from rollart.data.stores.mooncake_shelf import MooncakeShelf\n"
        "from rollart.data.weights import BucketStore\n"
        "from tests.data.store_contract import tensors\n"
        f"BucketStore(MooncakeShelf({running.address!r}, 'writer'), 1024, 2).publish(0, tensors(7.0))\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], env=dict(os.environ), capture_output=True, check=False)
    assert done.returncode == -9, done.stderr
    assert_holds(running.buckets("writer").fetch(0), 7.0)


def test_a_version_that_is_half_written_is_not_there_and_can_be_written_again(running: Store) -> None:
    shelf = running.shelf("half")
    shelf.write(0, "bucket-0000.safetensors", 4, [memoryview(b"half")])
    with pytest.raises(WeightsError, match="version 0 is not in the Mooncake store at"):
        running.buckets("half").fetch(0)
    running.buckets("half").publish(0, tensors(1.0))
    assert_holds(running.buckets("half").fetch(0), 1.0)


def test_a_store_without_room_refuses_a_version_whole_and_keeps_the_others(mortal: Store) -> None:
    writer = mortal.buckets("full", bucket_bytes=8 << 20, keep=2)
    large = [(f"w{n}", torch.full((1 << 20,), float(n))) for n in range(6)]  # 24 MiB
    writer.publish(0, large)
    writer.publish(1, large)
    with pytest.raises(WeightsError, match=r"the store has no room: its nodes are full.*Mooncake code -200"):
        writer.publish(2, large)
    assert writer.versions() == [0, 1]
    reader = mortal.buckets("full")
    for version in (0, 1):
        got = dict(reader.fetch(version))
        assert all(torch.equal(got[name], tensor) for name, tensor in large)
    with pytest.raises(WeightsError, match="version 2 is not in"):
        reader.fetch(2)


def test_what_was_just_read_is_removed_all_the_same(running: Store) -> None:
    writer, reader = running.buckets("leases"), running.buckets("leases")
    for version in range(6):
        writer.publish(version, tensors(version))
        assert_holds(reader.fetch(version), version)
    for version in range(4):
        with pytest.raises(WeightsError, match=f"version {version} is not in"):
            reader.fetch(version)


# ------------------------------------------------------------------------------------------------------------- deaths
def fallback(store: Store, folder: Path) -> FallbackStore:
    made = open_store(folder, 1024, 2, mooncake={"master": store.address, "prefix": "deaths", "patience_s": PATIENCE_S})
    assert isinstance(made, FallbackStore)
    return made


@pytest.mark.parametrize("dying", ["node", "master"])
def test_when_the_store_dies_versions_go_through_files_and_the_lost_one_is_rescued(
    dying: str, mortal: Store, tmp_path: Path
) -> None:
    writer, reader = fallback(mortal, tmp_path / "files"), fallback(mortal, tmp_path / "files")
    writer.publish(0, tensors(0.0))
    assert_holds(reader.fetch(0, infos()), 0.0)
    writer.publish(1, tensors(1.0))
    getattr(mortal, f"kill_{dying}")()
    with pytest.raises(WeightsLost, match="Mooncake"):
        list(reader.fetch(1))
    assert "version 1 is lost; from version 1 on, they go through files" in writer.rescue(1, tensors(1.0)).note
    assert_holds(reader.fetch(1), 1.0)
    assert writer.publish(2, tensors(2.0)).note == ""
    assert_holds(FileWeightStore(tmp_path / "files", 1024, 2).fetch(2), 2.0)


@pytest.mark.parametrize("dying", ["node", "master"])
def test_a_version_that_cannot_be_put_there_is_put_into_files(dying: str, mortal: Store, tmp_path: Path) -> None:
    writer, reader = fallback(mortal, tmp_path / "files"), fallback(mortal, tmp_path / "files")
    writer.publish(0, tensors(0.0))
    getattr(mortal, f"kill_{dying}")()
    with pytest.raises(WeightsLost, match="Mooncake"):
        writer.publish(1, tensors(1.0))
    assert "they go through files" in writer.rescue(1, tensors(1.0)).note
    assert_holds(reader.fetch(1), 1.0)


def test_without_a_store_from_the_beginning_an_engine_still_reads_files(mortal: Store, tmp_path: Path) -> None:
    mortal.kill_master()
    writer, reader = fallback(mortal, tmp_path / "files"), fallback(mortal, tmp_path / "files")
    with pytest.raises(WeightsLost, match="Mooncake store at"):
        writer.publish(0, tensors(3.0))
    writer.rescue(0, tensors(3.0))
    assert_holds(reader.fetch(0), 3.0)


def test_with_two_replicas_the_death_of_a_node_is_survived_without_files(tmp_path: Path) -> None:
    store = Store(tmp_path / "logs", SEGMENT_BYTES, num_nodes=2)
    try:
        writer = BucketStore(store.shelf("twice", replicas=2), 1024, 2)
        writer.publish(0, tensors(5.0))
        store.kill_node(0)
        assert_holds(BucketStore(store.shelf("twice", replicas=2), 1024, 2).fetch(0), 5.0)
    finally:
        store.close()


# --------------------------------------------------------------------------------------------------- a run's own store
def test_the_store_of_a_run_is_there_with_room_and_gone_after_it(tmp_path: Path) -> None:
    before = psutil.Process().children(recursive=True)

    async def scenario() -> list[psutil.Process]:
        async with mooncake_store(WeightsConfig(store="mooncake"), tmp_path, 30 << 20, local=True) as options:
            store = open_store(tmp_path / "files", 1 << 20, 2, mooncake=options)
            await asyncio.to_thread(store.publish, 0, tensors(4.0))
            got = await asyncio.to_thread(lambda: list(store.fetch(0)))
            assert_holds(got, 4.0)
            assert not (tmp_path / "files").exists()
            return [each for each in psutil.Process().children(recursive=True) if each not in before]

    processes = asyncio.run(scenario())
    assert len(processes) == 3
    _, alive = psutil.wait_procs(processes, 10.0)
    assert not alive


def test_a_store_that_outlives_runs_is_cleared_of_what_an_earlier_process_left(running: Store, tmp_path: Path) -> None:
    async def use(value: float, leave: bool) -> None:
        settings = WeightsConfig(store="mooncake", master=running.address)
        async with mooncake_store(settings, tmp_path, 0, local=True) as options:
            store = BucketStore(running.shelf(options["prefix"]), 1024, 2)
            with pytest.raises(WeightsError, match="is not in"):
                store.fetch(0)
            await asyncio.to_thread(store.publish, 0, tensors(value))
            assert_holds(store.fetch(0), value)
        if leave:
            store.publish(0, tensors(value))

    asyncio.run(use(1.0, leave=True))
    asyncio.run(use(2.0, leave=False))


def test_a_master_that_is_not_there_is_a_clear_error_before_the_run_begins(tmp_path: Path) -> None:
    async def scenario() -> None:
        settings = WeightsConfig(store="mooncake", master="127.0.0.1:1")
        async with mooncake_store(settings, tmp_path, 0, local=True):
            raise AssertionError("it began")

    with pytest.raises(WeightsError, match=r"weights.master: .*127.0.0.1:1"):
        asyncio.run(scenario())


def test_the_config_of_a_run_on_mooncake_is_valid() -> None:
    config = parse('[tasks.frozenlake]\n[weights]\nstore = "mooncake"\nreplicas = 2\n')
    assert (config.weights.store, config.weights.replicas) == ("mooncake", 2)
