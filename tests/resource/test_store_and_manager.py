"""Stores of all kinds keep one contract; runs on one store see each other, and outlive what happens to it."""

from __future__ import annotations

import asyncio
import fcntl
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from rollart.errors import ConfigError, ResourceError
from rollart.resource.manager import ResourceManager
from rollart.resource.store import MetadataStore, RedisStore, open_store
from rollart.types import Binding, PoolSpec

POOL = PoolSpec("wide", "H20", {"n": (0, 1, 2, 3)})
PATIENCE_S = 20.0


class RedisServer:
    """A real server on a free port of this machine, without anything on disk."""

    def __init__(self, folder: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None
        self.url = f"redis://127.0.0.1:{self.port}/0"

    def start(self) -> None:
        words = ["--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
        self._process = subprocess.Popen(
            ["redis-server", *words, "--dir", str(self._folder)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        deadline = time.monotonic() + PATIENCE_S
        while True:
            try:
                socket.create_connection(("127.0.0.1", self.port), 1.0).close()
                return
            except OSError:
                assert time.monotonic() < deadline, "redis-server does not answer"
                time.sleep(0.02)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


@pytest.fixture
def redis_server(tmp_path: Path) -> Iterator[RedisServer]:
    pytest.importorskip("redis")
    if shutil.which("redis-server") is None:
        pytest.skip("redis-server is not installed; on Debian: apt install redis-server")
    server = RedisServer(tmp_path)
    server.start()
    yield server
    server.kill()


@pytest.fixture(params=["memory", "file", "redis"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "redis":
        server: RedisServer = request.getfixturevalue("redis_server")
        return server.url
    return "memory" if request.param == "memory" else f"file:{tmp_path}/store"


# ---------------------------------------------------------------------------------------------------------- the stores
def test_a_swap_wins_only_over_the_revision_that_was_read(url: str) -> None:
    store = open_store(url)
    assert store.read("k") == (0, b"")
    assert store.swap("k", 0, b"one")
    assert not store.swap("k", 0, b"two")
    assert store.read("k") == (1, b"one")
    assert store.swap("k", 1, b"\x00\xff")
    assert store.read("k") == (2, b"\x00\xff")
    assert store.read("other") == (0, b"")
    store.close()


def test_a_lease_ends_unless_it_is_renewed_or_dropped(url: str) -> None:
    store = open_store(url)
    assert store.held([]) == []
    store.renew("long", 60.0)
    store.renew("short", 0.05)
    store.renew("dropped", 60.0)
    store.drop("dropped")
    store.drop("never there")
    time.sleep(0.1)
    assert store.held(["short", "long", "dropped", "unknown"]) == [False, True, False, False]
    store.close()


@pytest.mark.parametrize("url", ["file", "redis"], indirect=True)
def test_of_many_writers_at_once_each_revision_is_won_by_one(url: str) -> None:
    def add(_: int) -> None:
        store = open_store(url)
        while True:
            revision, document = store.read("sum")
            if store.swap("sum", revision, str(int(document or b"0") + 1).encode()):
                return store.close()

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(add, range(24)))
    store = open_store(url)
    assert store.read("sum") == (24, b"24")
    store.close()


@pytest.mark.parametrize(("bad", "kind", "line"), [
    ("etcd://somewhere", ConfigError, "resources.store: 'etcd://somewhere' is not a store"),
    ("redis://127.0.0.1:1/0", ResourceError, "redis://127.0.0.1:1/0 (is Redis running there"),
    ("file:/proc/nowhere", ResourceError, "metadata store /proc/nowhere"),
])  # fmt: skip
def test_a_store_that_is_not_there_is_named(bad: str, kind: type[Exception], line: str) -> None:
    pytest.importorskip("redis")
    with pytest.raises(kind) as caught:
        open_store(bad)
    assert line in str(caught.value)


def test_a_damaged_file_is_named_with_the_way_out(tmp_path: Path) -> None:
    store = open_store(f"file:{tmp_path}")
    (tmp_path / "rollart-resources.msgpack").write_bytes(b"\x93nonsense")
    with pytest.raises(ResourceError, match=r"is damaged .*; when no run uses this store, delete the file"):
        store.read("k")


def test_a_lock_that_is_never_let_go_is_told(tmp_path: Path) -> None:
    store = open_store(f"file:{tmp_path}")
    with (tmp_path / "rollart-resources.lock").open("ab") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(ResourceError, match=r"lock is held by another process for more than 5 s"):
            store.read("k")
    assert store.read("k") == (0, b"")


@pytest.mark.parametrize(
    ("url", "line"),
    [
        ("redis://127.0.0.1:notaport/0", "resources.store 'redis://127.0.0.1:notaport/0': ValueError: Port"),
        ("redis:", "resources.store: 'redis:' is not a store"),
        ("file:", "resources.store: 'file:' is not a store"),
    ],
)
def test_half_a_url_names_no_store(url: str, line: str) -> None:
    with pytest.raises(ConfigError) as caught:
        open_store(url)
    assert line in str(caught.value)


# --------------------------------------------------------------------------------------------------------- the manager
class Runs:
    """Managers of several runs on one store."""

    def __init__(self, url: str) -> None:
        self._shared = open_store(url) if url == "memory" else None
        self._url = url
        self.said: list[str] = []

    def store(self) -> MetadataStore:
        return self._shared or open_store(self._url)

    def manager(self, run: str, lease_s: float = 30.0, pool: PoolSpec = POOL) -> ResourceManager:
        return ResourceManager(self.store(), [pool], run, lease_s=lease_s, warn=self.said.append)


def with_runs(url: str, main: Callable[[Runs], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(main(Runs(url)))


async def until(reached: Callable[[], Coroutine[Any, Any, bool]]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not await reached():  # noqa: ASYNC110
            await asyncio.sleep(0.02)


def test_a_second_run_sees_what_is_taken_and_gets_what_is_left(url: str) -> None:
    async def main(runs: Runs) -> None:
        first, second = runs.manager("first"), runs.manager("second")
        await first.open()
        await second.open()
        mine = await first.bind("w", "g", "H20", 3)
        assert (await second.bind("w", "g", "H20")).devices == (3,)
        with pytest.raises(ResourceError, match=r"held by first \(1 worker\), second \(1 worker\)"):
            await second.bind("v", "g", "H20")
        (row,) = await second.rows()
        assert (row.free, row.holders) == (0, ("first/w", "second/w"))
        await first.release(mine)
        assert len((await second.bind("v", "g", "H20", 3)).devices) == 3
        await second.close()
        (row,) = await first.rows()
        assert row.free == 4
        await first.close()

    with_runs(url, main)


def test_many_workers_that_bind_at_once_never_share_a_device(url: str) -> None:
    async def main(runs: Runs) -> None:
        managers = [runs.manager(f"run{n}") for n in range(3)]
        for manager in managers:
            await manager.open()
        tries = [manager.bind(f"w{n}", "g", "H20") for manager in managers for n in range(3)]
        answers = await asyncio.gather(*tries, return_exceptions=True)
        devices = [each.devices for each in answers if not isinstance(each, BaseException)]
        assert sorted(devices) == [(0,), (1,), (2,), (3,)]
        assert sum(isinstance(each, ResourceError) for each in answers) == 5
        for manager in managers:
            await manager.close()

    with_runs(url, main)


def test_the_devices_of_a_run_that_was_killed_are_taken_back_when_its_lease_ends(url: str) -> None:
    async def main(runs: Runs) -> None:
        dead, alive = runs.manager("dead", lease_s=0.5), runs.manager("alive")
        await dead.open()
        await dead.bind("w", "g", "H20", 4)
        assert dead._beating is not None
        dead._beating.cancel()  # as kill -9 would
        await alive.open()

        async def free() -> bool:
            return (await alive.rows())[0].free == 4

        assert not await free()
        await until(free)
        assert len((await alive.bind("w", "g", "H20", 4)).devices) == 4
        assert any("run 'dead' is gone" in line for line in runs.said)
        await alive.close()

    with_runs(url, main)


def test_a_living_run_keeps_its_devices_beyond_its_first_lease(url: str) -> None:
    async def main(runs: Runs) -> None:
        keeper, other = runs.manager("keeper", lease_s=1.5), runs.manager("other")
        await keeper.open()
        await other.open()
        await keeper.bind("w", "g", "H20", 4)
        await asyncio.sleep(3.0)
        assert (await other.rows())[0].free == 0
        await keeper.close()
        await other.close()

    with_runs(url, main)


def test_a_run_of_the_same_name_that_lives_is_refused(url: str) -> None:
    async def main(runs: Runs) -> None:
        first = runs.manager("same")
        await first.open()
        with pytest.raises(ConfigError, match="a run of that name is alive"):
            await runs.manager("same").open()
        await first.close()

    with_runs(url, main)


def test_a_node_that_fails_costs_its_bindings_and_nobody_gets_it(url: str) -> None:
    async def main(runs: Runs) -> None:
        pool = PoolSpec("wide", "H20", {"n": (0,), "m": (0,)})
        manager = runs.manager("run", pool=pool)
        await manager.open()
        first = await manager.bind("w", "g", "H20")
        assert await manager.fail_node(first.node) == [first]
        assert (await manager.bind("w", "g", "H20")).node != first.node
        assert manager.lost == [f"node {first.node}"]
        assert [row.failed for row in await manager.rows() if row.node == first.node] == [1]
        await manager.close()

    with_runs(url, main)


def test_a_node_that_comes_back_serves_the_next_run_and_a_broken_device_waits_for_its_repair(url: str) -> None:
    async def main(runs: Runs) -> None:
        pool = PoolSpec("wide", "H20", {"n": (0, 1), "m": (0, 1)})
        first = runs.manager("first", pool=pool)
        await first.open()
        broken = await first.bind("w", "g", "H20")
        lost = "m" if broken.node == "n" else "n"
        await first.fail(broken)
        await first.fail_node(lost)
        assert {row.node: row.failed for row in await first.rows()} == {broken.node: 1, lost: 2}
        second = runs.manager("second", pool=pool)
        await second.open()
        assert {row.node: row.failed for row in await second.rows()} == {broken.node: 1, lost: 0}
        with pytest.raises(ConfigError, match="node 'x': no pool has it"):
            await second.repair("x")
        await second.repair(broken.node)
        assert not any(row.failed for row in await second.rows())
        await first.close()
        await second.close()

    with_runs(url, main)


def test_a_redis_server_that_is_killed_and_comes_back_empty_costs_a_run_nothing(redis_server: RedisServer) -> None:
    async def main(runs: Runs) -> None:
        manager = runs.manager("run", lease_s=0.5)
        await manager.open()
        held = await manager.bind("w", "g", "H20", 2)
        redis_server.kill()
        with pytest.raises(ResourceError, match=r"metadata store redis://127.0.0.1"):
            await manager.bind("v", "g", "H20")
        await asyncio.sleep(0.5)
        assert manager.bindings == [held], "what is bound stays bound"
        redis_server.start()
        other = runs.manager("other")

        async def seen() -> bool:
            return (await other.rows())[0].holders == ("run/w",)

        await until(seen)
        assert set((await manager.bind("v", "g", "H20", 2)).devices).isdisjoint(held.devices)
        assert any("metadata store is back" in line for line in runs.said)
        await manager.close()
        assert (await other.rows())[0].free == 4
        other_store = other._store
        assert isinstance(other_store, RedisStore)
        other_store.close()

    with_runs(redis_server.url, main)


def test_closing_without_a_store_is_a_warning_and_no_error(redis_server: RedisServer) -> None:
    async def main(runs: Runs) -> None:
        manager = runs.manager("run")
        await manager.open()
        await manager.bind("w", "g", "H20")
        redis_server.kill()
        await manager.close()
        assert any("were not given back, their lease ends by itself" in line for line in runs.said)

    with_runs(redis_server.url, main)


def test_a_damaged_view_is_told_and_written_anew_once_it_is_gone(url: str) -> None:
    async def main(runs: Runs) -> None:
        run, store = runs.manager("run", lease_s=0.5), runs.store()
        await run.open()
        binding = await run.bind("w", "g", "H20")
        revision, _ = store.read("pools/default")
        assert store.swap("pools/default", revision, b"\x93nonsense")
        with pytest.raises(ResourceError, match=r"the stored view of pools 'default' is damaged .*; delete it"):
            await run.rows()

        async def told() -> bool:
            return any("is damaged" in line for line in runs.said)

        await until(told)
        assert store.held(["default/run"]) == [True], "the lease is renewed all the same"
        revision, _ = store.read("pools/default")
        assert store.swap("pools/default", revision, b"")

        async def back() -> bool:
            return any("is back" in line for line in runs.said)

        await until(back)
        assert [row.holders for row in await run.rows()] == [(binding.binding_id,)]
        assert await run.is_ours(binding)
        await run.close()

    with_runs(url, main)


def test_a_run_that_was_frozen_beyond_its_lease_knows_what_is_no_longer_its_own(url: str) -> None:
    async def main(runs: Runs) -> None:
        frozen, other = runs.manager("frozen", lease_s=0.5), runs.manager("other")
        await frozen.open()
        binding = await frozen.bind("w", "g", "H20", 4)
        assert await frozen.is_ours(binding)
        assert frozen._beating is not None
        frozen._beating.cancel()  # as SIGSTOP would
        await other.open()

        async def bound() -> bool:
            try:
                return bool(await other.bind("w", "g", "H20"))
            except ResourceError:
                return False

        await until(bound)
        assert not await frozen.is_ours(binding)
        assert sum("run 'frozen' is gone" in line for line in runs.said) == 1, "told once"
        await other.close()

    with_runs(url, main)


def wake(manager: ResourceManager) -> None:
    """As SIGCONT after the freeze."""
    manager._beating = asyncio.get_running_loop().create_task(manager._beat())


def test_a_run_that_wakes_beyond_its_lease_lets_go_of_what_another_has_got_and_keeps_the_rest(url: str) -> None:
    async def main(runs: Runs) -> None:
        frozen, other = runs.manager("frozen", lease_s=0.5), runs.manager("other")
        taken: list[tuple[Binding, str]] = []
        frozen.on_taken = lambda binding, run: taken.append((binding, run))
        await frozen.open()
        gone, kept = await frozen.bind("w", "g", "H20", 2), await frozen.bind("v", "g", "H20")
        assert frozen._beating is not None
        frozen._beating.cancel()
        await other.open()

        async def free() -> bool:
            return (await other.rows())[0].free == 4

        await until(free)
        theirs = await other.bind("w", "g", "H20")
        assert set(theirs.devices) < set(gone.devices)
        wake(frozen)

        async def told() -> bool:
            return bool(taken)

        await until(told)
        assert taken == [(gone, "other")]
        assert frozen.bindings == [kept]
        assert not await frozen.is_ours(gone)
        assert await frozen.is_ours(kept)
        assert any(f"{gone} has gone to run 'other': this run gave no sign of life for 0.5 s" in s for s in runs.said)
        again = await frozen.bind("w", "g", "H20", 2)
        assert not set(again.devices) & {*theirs.devices, *kept.devices}
        await frozen.close()
        assert [row.holders for row in await other.rows()] == [("other/w",)]
        await other.close()

    with_runs(url, main)


def test_a_run_that_wakes_beyond_its_lease_gets_back_what_nobody_has_taken(url: str) -> None:
    async def main(runs: Runs) -> None:
        frozen, other = runs.manager("frozen", lease_s=0.5), runs.manager("other")
        frozen.on_taken = lambda binding, run: pytest.fail(f"{run} has {binding}")
        await frozen.open()
        await frozen.bind("w", "g", "H20", 3)
        assert frozen._beating is not None
        frozen._beating.cancel()
        await other.open()

        async def free() -> bool:
            return (await other.rows())[0].free == 4

        await until(free)
        await other.bind("w", "g", "H20", 3)
        await other.close()
        wake(frozen)

        async def back() -> bool:
            return (await frozen.rows())[0].holders == ("frozen/w",) and (await reader.rows())[0].free == 1

        reader = runs.manager("reader")
        await until(back)
        await frozen.close()

    with_runs(url, main)


def test_a_node_that_is_lost_under_two_runs_costs_each_its_own_workers_and_no_more(url: str) -> None:
    async def main(runs: Runs) -> None:
        pool = PoolSpec("wide", "H20", {"n": (0, 1), "m": (0, 1)})
        first, second = runs.manager("first", lease_s=0.5, pool=pool), runs.manager("second", lease_s=0.5, pool=pool)
        for manager in (first, second):
            manager.on_taken = lambda binding, run: pytest.fail(f"{run} has {binding}")
            await manager.open()
        lost = [(await manager.bind("w", "g", "H20")) for manager in (first, second)]
        if lost[0].node != lost[1].node:  # the roomiest node comes first
            await second.release(lost[1])
            lost[1] = await second.bind("w", "g", "H20", avoid=[lost[1].node])
        node = lost[0].node
        assert await first.fail_node(node) == [lost[0]]
        await asyncio.sleep(0.5)  # a beat of the other, which does not know yet
        assert not await second.is_ours(lost[1])
        assert await second.fail_node(node) == [lost[1]]
        moved = [(await manager.bind("w", "g", "H20")) for manager in (first, second)]
        assert {binding.node for binding in moved} == {"n", "m"} - {node}
        assert len({binding.devices for binding in moved}) == 2
        assert second.lost == [f"node {node}"]
        await first.close()
        await second.close()

    with_runs(url, main)
