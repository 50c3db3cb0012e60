"""SimulatedRuntime: nodes that are not there, and workers that are objects of this process, on modelled devices.

Invariants: a call reaches its object directly, without a copy, and raises WorkerDied once the worker is dead; a node
that went away takes its workers with it and is not offered again. What this file leaves out: what the workers do
(beside this file), and that time is virtual.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from types import CoroutineType
from typing import Any

from rollart.checks import nearest
from rollart.config import Config
from rollart.data.engines.simulated import SimulatedEngine
from rollart.data.simulated.device import Pace
from rollart.data.simulated.environment import SimulatedEnvironment
from rollart.data.simulated.inference import SimulatedInference
from rollart.data.simulated.model_shape import ModelShape
from rollart.data.simulated.profile import Profile, TaskProfile
from rollart.data.simulated.reward import SimulatedReward
from rollart.data.simulated.store import SimulatedStore
from rollart.data.simulated.timeline import Timeline
from rollart.data.trainers.simulated import SimulatedTrainer
from rollart.errors import ConfigError, WorkerDied
from rollart.protocols import WorkerHandle
from rollart.resource.classes import CLASSES, CPU, DeviceClass
from rollart.sections import FaultConfig, SimulateConfig
from rollart.types import Binding, NodeInfo

CPU_NODE = "cpu"
CPU_CORES = 4096
"""Of the node that every simulated cluster has; environments cost it nothing but their latency."""
ELASTIC = ("http", "https", "lambda", "fc", "ray")
"""Schemes of rewards that run elsewhere, as many at once as are asked for."""


class SimulatedWorker:
    """Implements `protocols.WorkerHandle` over an object of this process."""

    def __init__(self, name: str, built: Any, node: str) -> None:
        self.name = name
        self.built = built
        self.node = node
        self._death: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def call(self, method: str, *args: Any, returns: Any = Any) -> Any:  # noqa: ARG002
        """Call a method of the object."""
        death = self._death
        if death.done():
            raise WorkerDied(f"worker {self.name}, call {method}: {death.result()}")
        result = getattr(self.built, method)(*args)
        if isinstance(result, CoroutineType):
            result = await result
            if death.done():
                raise WorkerDied(f"worker {self.name}, call {method}: {death.result()}")
        return result

    async def wait_dead(self) -> str:
        """Return, with the reason, once it is dead."""
        return await asyncio.shield(self._death)

    async def stop(self) -> None:
        """Nobody calls it any more."""
        self.die("it was stopped")

    def die(self, reason: str) -> None:
        """What it had in hand is lost."""
        if not self._death.done():
            self._death.set_result(reason)
            if isinstance(self.built, SimulatedInference):
                self.built.die(WorkerDied(f"worker {self.name}: {reason}"))


class SimulatedRuntime:
    """The pools of `config` as nodes, and one object per worker. `tasks`: profile of each task of the config.

    Raises ConfigError for a device class without figures.
    """

    def __init__(
        self,
        config: Config,
        profile: Profile,
        model: ModelShape,
        tasks: Mapping[str, TaskProfile],
        timeline: Timeline | None = None,
    ) -> None:
        self._config, self._profile, self._model, self._tasks = config, profile, model, dict(tasks)
        self._settings = config.simulate or SimulateConfig()
        self._timeline = timeline
        self._nodes = {node.name: node for node in nodes_of(config)}
        self._store = SimulatedStore(model, profile.links)
        self._prefilling: list[SimulatedInference] = []
        self._num_training_devices = 0
        self._elastic = any(task.reward.partition("://")[0] in ELASTIC for task in config.tasks.values())
        self.workers: dict[str, SimulatedWorker] = {}

    async def nodes(self) -> list[NodeInfo]:
        """Those that are left."""
        return list(self._nodes.values())

    async def spawn(
        self,
        name: str,
        target: str,  # noqa: ARG002
        kwargs: Mapping[str, Any],  # noqa: ARG002
        binding: Binding | None = None,
    ) -> WorkerHandle:
        """Build the object of the binding's role; target and arguments are those of a real worker, and not used."""
        assert binding is not None
        worker = SimulatedWorker(name, self._build(name, binding), binding.node)
        self.workers[name] = worker
        return worker

    async def shutdown(self) -> None:
        """End all workers."""
        for worker in self.workers.values():
            worker.die("it was stopped")

    def strike(self, fault: FaultConfig) -> str:
        """Let something break, now; what happened, in one line. Raises ConfigError when there is no such thing."""
        if fault.worker:
            if fault.worker not in self.workers:
                hint = nearest(fault.worker, [*self.workers])
                raise ConfigError(f"simulate.faults: no worker {fault.worker!r}{hint}")
            self.workers[fault.worker].die("simulated fault")
            return f"worker {fault.worker} dies"
        gone = [node for node in self._nodes if node == fault.node or (fault.pool and _pool_of(node) == fault.pool)]
        if not gone:
            what = fault.node or fault.pool
            raise ConfigError(f"simulate.faults: no node of {what!r} is there; nodes: {', '.join(self._nodes)}")
        for node in gone:
            del self._nodes[node]
        for worker in list(self.workers.values()):
            if worker.node in gone:
                worker.die(f"node {worker.node} is gone")
        return f"{len(gone)} nodes go: {', '.join(gone[:4])}{' ...' if len(gone) > 4 else ''}"

    # ------------------------------------------------------------------------------------------------------ inside
    def _build(self, name: str, binding: Binding) -> Any:
        match binding.role:
            case "actor_gen":
                return self._inference(name, binding)
            case "environment":
                return SimulatedEnvironment(self._tasks, self._config.tasks)
            case "reward":
                return SimulatedReward(self._tasks, self._elastic)
            case "actor_train":
                self._num_training_devices += len(binding.devices)
                return self._trainer(binding)
            case other:
                raise ConfigError(f"roles.{other}: a simulated run has no worker of this role")

    def _pace(self, binding: Binding, num_devices: int) -> Pace:
        emulated = self._profile.engine == "emulated"
        return Pace(figures(binding.device_class), self._model, num_devices, self._profile.efficiency, emulated)

    def _inference(self, name: str, binding: Binding) -> SimulatedInference:
        pace, prefill = self._pace(binding, len(binding.devices)), self._settings.prefill
        engine = SimulatedEngine(
            pace,
            self._profile.efficiency,
            slots=self._config.rollout.engine_slots,
            max_model_tokens=self._config.rollout.max_model_tokens,
        )
        inference = SimulatedInference(
            name,
            engine,
            self._store,
            pace,
            self._profile.links,
            prefill_peers=self._prefilling if prefill and prefill != binding.device_class else [],
            timeline=self._timeline,
        )
        if prefill and prefill == binding.device_class:
            self._prefilling.append(inference)
        return inference

    def _trainer(self, binding: Binding) -> SimulatedTrainer:
        return SimulatedTrainer(
            self._pace(binding, 1),
            lambda: self._num_training_devices,
            self._store,
            timeline=self._timeline,
            seconds_per_token=self._profile.train_s_per_token,
        )


def nodes_of(config: Config) -> list[NodeInfo]:
    """Machines that have what `[pools.*]` declares, and one with CPU cores. Raises ConfigError.

    Nodes that a pool names are made as it says; a count is cut into nodes of `simulate.devices_per_node`.
    """
    size = (config.simulate or SimulateConfig()).devices_per_node
    nodes = [NodeInfo(CPU_NODE, {CPU: CPU_CORES})]
    for name, pool in config.pools.items():
        device_class = pool.device_class or name
        if pool.url or device_class == CPU:
            continue
        cuda = (device_class,) if pool.device != "cpu" else ()
        if pool.nodes:
            nodes += [NodeInfo(node, {device_class: size}, cuda) for node in pool.nodes]
            continue
        count = pool.count or size
        for number, first in enumerate(range(0, count, size)):
            nodes.append(NodeInfo(f"{name}-{number}", {device_class: min(size, count - first)}, cuda))
    return nodes


def figures(device_class: str) -> DeviceClass:
    """The figures of a class. Raises ConfigError where there are none."""
    if device_class not in CLASSES:
        raise ConfigError(
            f"simulate: device class {device_class!r} has no figures{nearest(device_class, [*CLASSES])}; "
            f"known: {', '.join(CLASSES)}"
        )
    return CLASSES[device_class]


def _pool_of(node: str) -> str:
    return node.rpartition("-")[0]
