"""Measuring environments and adding workers, over a fake fleet in virtual time; and with real workers."""

from __future__ import annotations

import asyncio
from pathlib import Path

from rollart.config import parse
from rollart.data.cluster import Member
from rollart.errors import ResourceError
from rollart.pipeline import model_folder
from rollart.protocols import WorkerHandle
from rollart.scaling import EnvironmentScaler
from rollart.tasks import registry
from rollart.types import EngineStats, EnvironmentCost
from rollart.virtual_time import run_virtual
from rollart.workers import started
from tests.e2e.laboratory import SMALL
from tests.fakes import FakeWorker


class FakeFleet:
    """Environments that could use `demand` cores in all."""

    def __init__(self, demand: float, cores: int) -> None:
        self.demand, self.cores = demand, cores
        self.since: dict[str, float] = {"environment-0": 0.0}

    @property
    def use(self) -> float:
        """Cores of each worker."""
        return min(1.0, self.demand / len(self.since))

    async def environment_costs(self) -> dict[str, EnvironmentCost]:
        now = asyncio.get_running_loop().time()
        busy_s = {name: (now - since) * self.use for name, since in self.since.items()}
        return {name: EnvironmentCost(0, int(each * 100), 0.0, each, each) for name, each in busy_s.items()}

    async def free_cores(self) -> int:
        return self.cores - len(self.since)

    async def add_environment(self) -> WorkerHandle:
        name = f"environment-{len(self.since)}"
        if self.cores <= len(self.since):
            raise ResourceError("no core")
        self.since[name] = asyncio.get_running_loop().time()
        return FakeWorker(name)

    async def engines(self) -> dict[str, EngineStats]:
        """Busy for the share of the demand that the environments meet."""
        now = asyncio.get_running_loop().time()
        return {"inference-0": EngineStats(busy_s=now * min(1.0, len(self.since) / self.demand) ** 2)}


def scaled(demand: float, cores: int) -> tuple[FakeFleet, list[str], list[str]]:
    """The fleet after a minute, what was said, and whom somebody watches."""
    fleet = FakeFleet(demand, cores)
    said: list[str] = []
    watched: list[str] = []

    async def main() -> None:
        stages = {"reset": 0, "generate": 2, "step": 8, "score": 0}
        scaler = EnvironmentScaler(
            fleet, fleet.engines, stages, lambda worker: watched.append(worker.name), said.append
        )
        task = asyncio.ensure_future(scaler.run())
        await asyncio.sleep(60)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    run_virtual(main())
    return fleet, said, watched


def test_workers_are_added_while_they_are_the_bottleneck_and_each_decision_is_said() -> None:
    fleet, said, watched = scaled(demand=3.0, cores=64)
    assert list(fleet.since) == ["environment-0", *watched]
    assert 3 <= len(fleet.since) <= 6
    assert said[0].startswith("environment workers: 1 -> 2: a call costs 10 ms of CPU, 100 calls/s use 1.0 cores")
    assert sum("->" in line for line in said) == 2
    assert said[-1].startswith("environment workers: 4 are enough")


def test_cheap_environments_keep_one_worker_and_that_is_said_once() -> None:
    fleet, said, _ = scaled(demand=0.2, cores=64)
    assert len(fleet.since) == 1
    (line,) = said
    assert line.startswith("environment workers: 1 are enough")


def test_cores_are_never_exceeded() -> None:
    fleet, said, _ = scaled(demand=30.0, cores=5)
    assert len(fleet.since) == 5
    assert "no core is free" in said[-1]


def test_an_added_worker_takes_its_share(tmp_path: Path) -> None:
    config = parse(SMALL, ["runtime=local", "pools.CPU.ids='0-7'"])

    async def main() -> None:
        specs, said = registry.specs(config), []
        weights = {"folder": str(tmp_path / "weights"), "bucket_bytes": 1 << 20, "keep": 2}
        model = await model_folder("tiny")
        async with started(config, "run", tmp_path, specs, model, weights, False, said.append) as workers:
            before = await workers.free_cores()
            await workers.add_environment()
            assert await workers.free_cores() == before - 1
            members: list[Member] = workers.of_role("environment")
            assert [member.name for member in members] == ["environment-0", "environment-1"]
            for number in range(4):
                await workers.environment.reset(f"e{number}", "friendly", number)
            costs = await workers.environment_costs()
            assert [cost.resets for cost in costs.values()] == [2, 2]
            assert all(cost.process_cpu_s > cost.reset_cpu_s > 0 for cost in costs.values())
            workers.decide("because")
            assert workers.report().decisions == said == ["because"]

    asyncio.run(main())
