"""Clusters over real processes and over objects in this one: how calls spread, and what a fault says."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, Literal

import pytest

import rollart.distributed as rdist
from rollart.data.cluster import spawn
from rollart.errors import ConfigError, ResourceError, RewardError, WorkerDied, WorkerError
from rollart.types import Binding, NodeInfo
from rollart.virtual_time import run_virtual

PATIENCE_S = 60.0


class Counter(rdist.Worker):
    """Says where it is and what it got."""

    role = "counter"

    def __init__(self, start: int = 0) -> None:
        if start < 0:
            raise ConfigError("start: must not be negative")
        self.count = start

    @rdist.register(mode="execute_all")
    def add(self, number: int, twice: bool = False) -> int:
        self.count += number * (2 if twice else 1)
        return self.count

    @rdist.register(mode="execute_first")
    async def first(self) -> int:
        return self.count

    @rdist.register(mode="split", split=("texts", "weights"))
    def join(self, texts: list[str], weights: list[int], end: str = "") -> list[str]:
        return [f"{text * weight}{end}" for text, weight in zip(texts, weights, strict=True)]

    @rdist.register(mode="split", reduce="mean")
    def mean(self, numbers: list[float]) -> float:
        return sum(numbers) / len(numbers)

    @rdist.register(mode="split", reduce="list")
    def sizes(self, numbers: list[float]) -> int:
        return len(numbers)

    @rdist.register()
    def fail(self, kind: str) -> None:
        if kind == "exit":
            os._exit(7)
        raise {"ours": RewardError("no reward"), "theirs": KeyError("lost")}[kind]

    def undeclared(self) -> None: ...


class Generator(rdist.ActorGen):
    """Answers with its class."""

    def __init__(self, names: list[str]) -> None:
        self.names = names

    @rdist.hw_mapping({"FrozenLake": "H800", "default": "H20"})
    async def generate(self, prompt: list[int], tag_name: str = "default") -> str:
        return f"{tag_name}:{os.getpid()}"

    @rdist.register(mode="execute_all")
    @rdist.hw_mapping({"FrozenLake": "H800", "default": "H20"})
    def warm(self, tag_name: str = "default") -> int:
        return os.getpid()


class Scorer(rdist.Reward):
    @rdist.register_serverless(attribute="reward_proxy", serverless_url="local://tests.data.test_cluster:score")
    def compute_rewards(self, trajectory: str) -> float:
        return self.reward_proxy(trajectory) + 1.0  # type: ignore[attr-defined, no-any-return]


class Astray(rdist.Reward):
    @rdist.register_serverless(attribute="reward_proxy", serverless_url="gopher://somewhere")
    def compute_rewards(self, trajectory: str) -> float:
        return 0.0


def score(trajectory: str) -> float:
    return float(len(trajectory))


def in_session(
    main: Callable[[rdist.Session], Coroutine[Any, Any, None]],
    runtime: Literal["local", "inline"] = "inline",
    pools: dict[str, range] | None = None,
) -> None:
    async def run() -> None:
        async with asyncio.timeout(PATIENCE_S), rdist.session(pools, runtime=runtime) as session:
            await main(session)

    asyncio.run(run())


@pytest.mark.parametrize("runtime", ["inline", "local"])
def test_calls_spread_as_declared_by_name_and_by_function(runtime: Literal["local", "inline"]) -> None:
    async def main(session: rdist.Session) -> None:
        cluster = await session.cluster(Counter, workers=3, kwargs={"start": 5})
        assert len(cluster) == 3
        assert await cluster.add(2) == [7, 7, 7]
        assert await cluster.call(Counter.add, 1, twice=True) == [9, 9, 9]
        assert await cluster.call(Counter.add, twice=True, number=0) == [9, 9, 9]
        assert await cluster.first() == 9
        assert await cluster.call(Counter.first) == 9
        assert await cluster.join(["a", "b", "c", "d"], [1, 2, 3, 4]) == ["a", "bb", "ccc", "dddd"]
        assert await cluster.call(Counter.join, ["a"], [2], end="!") == ["aa!"]
        assert await cluster.join([], []) == []
        assert await cluster.mean([1.0, 2.0, 3.0, 10.0]) == 4.0
        assert await cluster.sizes([0.0] * 7) == [2, 2, 3]

    in_session(main, runtime)


def test_calls_go_to_the_class_of_their_tag_and_fall_back_to_a_compatible_one() -> None:
    async def main(session: rdist.Session) -> None:
        cluster = await session.cluster(Generator, kwargs={"names": []})
        assert [member.binding.device_class for member in cluster.members] == ["H800", "H20"]
        (fast,), (wide,) = await cluster.warm("FrozenLake"), await cluster.warm()
        assert fast != wide
        assert await cluster.generate([1], tag_name="FrozenLake") == f"FrozenLake:{fast}"
        assert await cluster.generate([1]) == f"default:{wide}"
        assert await cluster.call(Generator.generate, [1], "Maths") == f"Maths:{wide}"

    in_session(main, "local", {"H800": range(1), "H20": range(8, 9)})


def test_errors_come_home_with_worker_binding_and_remote_traceback() -> None:
    async def main(session: rdist.Session) -> None:
        cluster = await session.cluster(Counter, workers=2)
        with pytest.raises(RewardError, match="no reward") as ours:
            await cluster.fail("ours")
        assert any("Counter.fail on worker counter-0 (CPU:0 of pool CPU" in note for note in ours.value.__notes__)
        with pytest.raises(WorkerError) as theirs:
            await cluster.fail("theirs")
        for part in ("Counter.fail on worker counter-0 (CPU:0 of pool CPU on localhost)", "KeyError", "Traceback"):
            assert part in str(theirs.value)
        assert await cluster.add(1) == [1, 1], "it lives on"

    in_session(main)


def test_a_worker_that_dies_is_named_and_never_called_again() -> None:
    async def main(session: rdist.Session) -> None:
        cluster = await session.cluster(Counter, workers=2)
        with pytest.raises(WorkerDied, match=r"Counter.fail on worker counter-. .*: its process was ended with exit"):
            await cluster.fail("exit")
        assert len(cluster) == 0
        with pytest.raises(ResourceError, match="no worker of Counter is left"):
            await cluster.add(1)

    in_session(main, "local")


def test_wrong_calls_are_refused_with_the_nearest_name() -> None:
    async def main(session: rdist.Session) -> None:
        cluster = await session.cluster(Counter)
        with pytest.raises(AttributeError, match="Counter has no method 'adds'; did you mean 'add'"):
            await cluster.adds(1)
        with pytest.raises(
            AttributeError, match=r"Counter.undeclared is not declared; decorate it with @rdist.register"
        ):
            await cluster.undeclared()
        with pytest.raises(TypeError, match=r"Counter.add: missing a required argument: 'number'"):
            await cluster.add()
        with pytest.raises(ConfigError, match=r"lists to split differ in length: {'texts': 1, 'weights': 2}"):
            await cluster.join(["a"], [1, 2])
        with pytest.raises(ConfigError, match="texts is split and must be a list, not str"):
            await cluster.join("ab", [1, 2])
        with pytest.raises(ConfigError, match="'mean' of nothing is nothing"):
            await cluster.mean([])
        with pytest.raises(ConfigError, match="Counter has no method 'compute_rewards'"):
            await cluster.call(Scorer.compute_rewards, "x")  # type: ignore[arg-type]

    in_session(main)


def test_what_cannot_be_placed_is_refused_before_anything_starts() -> None:
    async def main(session: rdist.Session) -> None:
        with pytest.raises(ConfigError, match="Counter: no pool has device class 'H80'; did you mean 'H800'"):
            await session.cluster(Counter, device_class="H80")
        with pytest.raises(
            ConfigError, match=r"Generator.generate: hw_affinity of 'default': no worker is on class 'H20'"
        ):
            await session.cluster(Generator, device_class="H800")
        with pytest.raises(ResourceError, match="no node has 1 device of class 'H800' free"):
            await session.cluster(Counter, workers=2, device_class="H800")
        with pytest.raises(ConfigError, match="start: must not be negative"):
            await session.cluster(Counter, device_class="H800", kwargs={"start": -1})

        class Local(rdist.Worker): ...

        with pytest.raises(ConfigError, match="cannot find a class in a function"):
            await session.cluster(Local)
        assert all(row.free == row.total for row in await session.rows()), "nothing stays bound"

    in_session(main, pools={"H800": range(1)})


def test_a_cluster_that_is_stopped_gives_its_devices_back() -> None:
    async def main(session: rdist.Session) -> None:
        for _ in range(3):
            cluster = await session.cluster(Counter, workers=2, device_class="H800")
            assert [row.free for row in await session.rows() if row.device_class == "H800"] == [0]
            await session.stop(cluster)
            assert [row.free for row in await session.rows() if row.device_class == "H800"] == [2]

    in_session(main, pools={"H800": range(2)})


def test_a_serverless_attribute_is_replaced_by_what_its_url_names() -> None:
    async def main(session: rdist.Session) -> None:
        assert await (await session.cluster(Scorer)).compute_rewards("abc") == 4.0
        with pytest.raises(ConfigError, match="serverless_url 'gopher://somewhere': scheme 'gopher' is not a choice"):
            await session.cluster(Astray)

    in_session(main)


class Slow:
    """A runtime whose workers take as many seconds to start as their targets say; a negative one fails."""

    async def nodes(self) -> list[NodeInfo]:
        return []

    async def spawn(self, name: str, target: str, kwargs: Any, binding: Binding | None = None) -> Any:
        await asyncio.sleep(abs(float(target)))
        if float(target) < 0:
            raise ResourceError(f"{name} cannot be")
        return name

    async def shutdown(self) -> None: ...


def on_cpu(number: int) -> Binding:
    return Binding(f"run/w-{number}", "actor_gen", "CPU", "CPU", "localhost", (), "CPU")


def test_who_is_not_there_yet_is_told_while_workers_start() -> None:
    said: list[str] = []
    wanted = [(on_cpu(number), seconds, {}) for number, seconds in enumerate(("1", "20", "40", "16", "17", "18"))]
    members = run_virtual(spawn(Slow(), wanted, say=said.append))
    assert [member.handle for member in members] == [f"w-{number}" for number in range(6)]
    assert said == ["still starting: w-1, w-2, w-3, w-4 and 1 more", "still starting: w-2"]
    with pytest.raises(ResourceError, match="w-1 cannot be"):
        run_virtual(spawn(Slow(), [(on_cpu(0), "90", {}), (on_cpu(1), "-20", {})], say=said.append))
    assert said[2:] == ["still starting: w-0, w-1"]


SCRIPT = """
import asyncio
import rollart.distributed as rdist

class Echo(rdist.Worker):
    @rdist.register()
    def echo(self, text: str) -> str:
        return text.upper()

async def main():
    async with rdist.session() as session:
        print(await (await session.cluster(Echo, workers=2)).echo("hello"))

if __name__ == "__main__":
    asyncio.run(main())
"""


def test_a_script_of_ones_own_needs_no_package(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(SCRIPT)
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, str(path)],
        env={**os.environ, "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.stdout, done.returncode) == ("['HELLO', 'HELLO']\n", 0), done.stderr
