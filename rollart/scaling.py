"""Measures what environments cost while a run goes on, and adds environment workers where that is the bottleneck.

Invariant: each new verdict is told once, in one line with the measurements behind it; nothing is decided on a window in
which a worker died or joined. What this file leaves out: the verdict (`resource/scaling.py`), starting (`workers.py`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Protocol

from msgspec import Struct

from rollart.errors import RollartError
from rollart.protocols import WorkerHandle
from rollart.resource.scaling import EnvironmentLoad, decide
from rollart.types import EngineStats, EnvironmentCost

WINDOW_S = 5.0
SAMPLES = 10
"""Looks at the stages of trajectories per window."""


class Fleet(Protocol):
    """The environment workers of a run, as `Workers` has them."""

    async def environment_costs(self) -> dict[str, EnvironmentCost]:
        """Per living worker, its counters."""
        ...

    async def free_cores(self) -> int:
        """Cores for which no worker of any run stands; below 0 where workers share cores. Raises ResourceError."""
        ...

    async def add_environment(self) -> WorkerHandle:
        """Start one more, which takes its share. Raises RollartError."""
        ...


class _Sample(Struct, frozen=True):
    at: float
    costs: dict[str, EnvironmentCost]
    engines: dict[str, EngineStats]


class EnvironmentScaler:
    """`stages`: running trajectories by stage, now; `watch`: told of each new worker; `say`: told of each verdict."""

    def __init__(
        self,
        fleet: Fleet,
        engines: Callable[[], Awaitable[dict[str, EngineStats]]],
        stages: Mapping[str, int],
        watch: Callable[[WorkerHandle], None],
        say: Callable[[str], None],
    ) -> None:
        self._fleet = fleet
        self._engines = engines
        self._stages = stages
        self._watch = watch
        self._say = say
        self._told = ""

    async def run(self) -> None:
        """Measure and decide until cancelled. Never raises: a run can do without."""
        while True:
            try:
                load = await self._measure()
                if load is not None:
                    await self._obey(load)
            except RollartError as error:
                self._say(f"environment workers: their number stays: {str(error).splitlines()[0]}")
                await asyncio.sleep(WINDOW_S)

    async def _measure(self) -> EnvironmentLoad | None:
        """The load of one window; None when nobody called, or workers came or went."""
        before, shares = await self._sample(), []
        for _ in range(SAMPLES):
            await asyncio.sleep(WINDOW_S / SAMPLES)
            if running := sum(self._stages.values()):
                shares.append((self._stages["reset"] + self._stages["step"]) / running)
        after = await self._sample()
        same = before.costs.keys() == after.costs.keys() and before.engines.keys() == after.engines.keys()
        if not shares or not same or not after.costs or not after.engines:
            return None
        return _load(before, after, sum(shares) / len(shares))

    async def _sample(self) -> _Sample:
        costs, engines = await self._fleet.environment_costs(), await self._engines()
        return _Sample(asyncio.get_running_loop().time(), costs, engines)

    async def _obey(self, load: EnvironmentLoad) -> None:
        if not load.calls:
            return
        verdict = decide(load, await self._fleet.free_cores())
        if verdict.kind == "grow" or verdict.kind != self._told:
            self._say(verdict.why)
        self._told = verdict.kind
        for _ in range(verdict.add):
            self._watch(await self._fleet.add_environment())


def _load(before: _Sample, after: _Sample, in_environment: float) -> EnvironmentLoad:
    seconds = after.at - before.at

    def grown(name: str) -> float:
        return sum(float(getattr(after.costs[each], name) - getattr(before.costs[each], name)) for each in after.costs)

    busy_s = [after.engines[each].busy_s - before.engines[each].busy_s for each in after.engines]
    return EnvironmentLoad(
        seconds=seconds,
        workers=len(after.costs),
        cores=grown("process_cpu_s") / seconds,
        calls=int(grown("resets") + grown("steps")),
        call_cpu_s=grown("reset_cpu_s") + grown("step_cpu_s"),
        engine_idle=max(0.0, 1 - sum(busy_s) / len(busy_s) / seconds),
        in_environment=in_environment,
    )
