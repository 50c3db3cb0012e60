"""The programming model of the paper (section 3) under one name: `import rollart.distributed as rdist`.

    class Judge(rdist.Worker):
        role = "judge"

        @rdist.register(mode="split")
        def score(self, texts: list[str]) -> list[float]: ...

    async with rdist.session({"H800": range(8), "H20": range(8, 32)}) as session:
        judges = await session.cluster(Judge, workers=2, device_class="H20")
        scores = await judges.score(texts)

A session holds a runtime (processes of this machine, or Ray) and the pools that its Workers are bound to. Invariant:
when the session ends, on whatever way, its workers have ended and its devices are free. What this file leaves out: the
training run, which is built from the same parts (`pipeline.py`).
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import AsyncIterator, Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar

from rollart.checks import nearest
from rollart.control.background import Background
from rollart.data.cluster import Cluster, Member, check_affinity, spawn
from rollart.data.runtime import open_runtime
from rollart.data.targets import target_of
from rollart.declarations import declared_methods, hw_mapping, register, register_serverless
from rollart.errors import ConfigError
from rollart.protocols import Runtime
from rollart.resource.classes import CPU, ROLE_WANTS, best_for
from rollart.resource.manager import ResourceManager
from rollart.resource.placement import CPU_SHARE, pool_specs
from rollart.resource.pool import PoolRow, Pools
from rollart.resource.store import open_store
from rollart.types import Binding, NodeInfo, PoolSpec

__all__ = [
    "ActorGen",
    "ActorTrain",
    "Binding",
    "Cluster",
    "Environment",
    "PoolSpec",
    "Reward",
    "Session",
    "Worker",
    "hw_mapping",
    "register",
    "register_serverless",
    "session",
]


class Worker:
    """Base of user Workers. `role` names the group in bindings and tables; a role of its own is fine.

    Methods are plain or async functions of annotated parameters; values travel as MessagePack (numbers, text, bytes,
    lists, dicts, msgspec Structs). Plain methods of one worker run one at a time, async ones concurrently.
    """

    role: ClassVar[str] = "worker"


class ActorTrain(Worker):
    """A Worker that trains; compute-optimised devices by default."""

    role = "actor_train"


class ActorGen(Worker):
    """A Worker that generates; bandwidth-optimised devices by default."""

    role = "actor_gen"


class Reward(Worker):
    """A Worker that scores; a local accelerator by default, the cheapest."""

    role = "reward"


class Environment(Worker):
    """A Worker that hosts environments; CPU by default."""

    role = "environment"


W = TypeVar("W")


class Session:
    """A runtime and its pools; made by `session`."""

    def __init__(self, runtime: Runtime, resources: ResourceManager, pools: Pools) -> None:
        self._runtime = runtime
        self._resources = resources
        self._pools = pools
        self._started = 0
        self._members: dict[str, Member] = {}
        self._background = Background()
        resources.on_taken = self._leave

    async def cluster(
        self,
        worker: type[W],
        *,
        workers: int | Mapping[str, int] = 0,
        device_class: str = "",
        devices: int = 1,
        kwargs: Mapping[str, Any] | None = None,
    ) -> Cluster[W]:
        """Start workers of one class, each with `devices` devices of one node.

        workers: a number, or a number per device class; 0: one per class that an `hw_mapping` of it names, else one.
        device_class: where a plain number of workers goes; default: what suits the role.

        Raises ConfigError for a class or function that does not exist, before anything starts; ResourceError when no
        device is free; else what a constructor raised, and then none of the workers is left.
        """
        classes = self._classes(worker, workers, device_class)
        fallback = {name: self._pools.compatible(name)[1:] for name in self._pools.classes}
        check_affinity(worker, set(classes), fallback)
        target = target_of(worker)
        role = getattr(worker, "role", worker.__name__)
        bound: list[Binding] = []
        try:
            for name in classes:
                title = f"{role.replace('_', '-')}-{self._started}"
                self._started += 1
                bound.append(await self._resources.bind(title, role, name, devices))
            members = await spawn(self._runtime, [(binding, target, kwargs or {}) for binding in bound])
        except BaseException:
            for binding in bound:
                await self._resources.release(binding)
            raise
        self._members |= {member.binding.binding_id: member for member in members}
        return Cluster(worker, members, fallback)

    async def stop(self, cluster: Cluster[Any]) -> None:
        """End the workers of a cluster and give its devices back."""
        members: list[Member] = cluster.members
        await cluster.stop()
        for member in members:
            self._members.pop(member.binding.binding_id, None)
            await self._resources.release(member.binding)

    def _leave(self, binding: Binding, run: str) -> None:  # noqa: ARG002 - the manager has told of it
        """Another run has got the devices of a binding: the worker on it ends, and its cluster buries it."""
        if (member := self._members.pop(binding.binding_id, None)) is not None:
            self._background.spawn(member.handle.stop(), f"end of {member.name}")

    async def rows(self) -> list[PoolRow]:
        """The pools as they are now, other runs' bindings included."""
        return await self._resources.rows()

    def _classes(self, worker: type, workers: int | Mapping[str, int], device_class: str) -> list[str]:
        """One device class per worker."""
        if isinstance(workers, Mapping):
            names = [name for name, number in workers.items() for _ in range(number)]
        else:
            wanted = [device_class] if device_class else self._default_classes(worker)
            names = [wanted[number % len(wanted)] for number in range(workers or len(wanted))]
        for name in names:
            if name not in self._pools.classes:
                raise ConfigError(
                    f"{worker.__name__}: no pool has device class {name!r}{nearest(name, self._pools.classes)}"
                )
        return names

    def _default_classes(self, worker: type) -> list[str]:
        declared = [name for each in declared_methods(worker).values() for name in each.affinity.values()]
        if declared:
            there = set(self._pools.classes)
            stands_in = {name: next((c for c in self._pools.compatible(name) if c in there), name) for name in declared}
            return list(dict.fromkeys(stands_in.values()))
        role = getattr(worker, "role", "")
        known = [(spec.device_class, spec.optimised or None, spec.cost) for spec in self._pools.specs.values()]
        best = best_for(ROLE_WANTS.get(role, "general"), known)  # type: ignore[arg-type]
        if best is None:
            raise ConfigError(f"{worker.__name__}: there are no devices at all")
        return [best]


@contextlib.asynccontextmanager
async def session(
    pools: Mapping[str, Iterable[int] | PoolSpec] | None = None,
    *,
    runtime: Literal["local", "inline", "ray"] = "local",
    store: str = "memory",
    name: str = "default",
    run: str = "",
    logs: str | Path = "",
) -> AsyncIterator[Session]:
    """Open a runtime with pools, and close both at the end.

    pools: device class -> ids of devices of this machine, as in the paper's listing, or a PoolSpec. CPU cores need not
    be named. Default: what the machine, or the Ray cluster, has. A class that the machine lacks is emulated on its CPU.
    store, name: see `[resources]`; `run` names this session there, `logs` is a folder for workers' output.
    """
    opened = open_store(store)
    with contextlib.ExitStack() as stack:
        folder = Path(logs) if logs else Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rollart-")))
        workers = open_runtime(runtime, folder)
        try:
            specs = _specs(pools, await workers.nodes())
            manager = ResourceManager(opened, specs, run or f"session-{os.getpid()}-{id(workers):x}", name=name)
            await manager.open()
            try:
                yield Session(workers, manager, Pools(specs))
            finally:
                await workers.shutdown()
                await manager.close()
        finally:
            await workers.shutdown()


def _specs(pools: Mapping[str, Iterable[int] | PoolSpec] | None, nodes: list[NodeInfo]) -> list[PoolSpec]:
    if pools is None:
        return pool_specs({}, nodes)
    here = nodes[0]
    specs = []
    for name, devices in pools.items():
        if isinstance(devices, PoolSpec):
            specs.append(devices)
            continue
        ids = tuple(devices)
        if not ids:
            raise ConfigError(f"pools: {name!r} has no device; give ids such as range(8)")
        share = CPU_SHARE if name == CPU else 1
        specs.append(PoolSpec(name, name, {here.name: ids}, share, device="cuda" if name in here.cuda else "cpu"))
    if CPU not in {spec.device_class for spec in specs}:
        specs += [spec for spec in pool_specs({}, nodes) if spec.device_class == CPU]
    return specs
