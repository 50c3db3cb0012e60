"""SimulatedRuntime: nodes that are not there, and workers that are objects of this process, on modelled devices.

Invariants: a call reaches its object directly, without a copy, and raises WorkerDied once the worker is dead; a node
that went away takes its workers with it and is not offered again. What this file leaves out: what the workers do
(beside this file), and that time is virtual.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator, Mapping
from types import CoroutineType
from typing import Any

from msgspec.structs import replace

from rollart import toml
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
from rollart.data.trainers.simulated import SimulatedTrainer, TrainSeconds, measured, modelled
from rollart.errors import ConfigError, WorkerDied
from rollart.protocols import WorkerHandle
from rollart.resource.classes import CLASSES, CPU, DeviceClass
from rollart.resource.placement import indices, place
from rollart.sections import FaultConfig, RoleConfig, SimulateConfig
from rollart.types import Binding, EngineStats, NodeInfo

CPU_NODE = "cpu"
CPU_CORES = 4096
"""Of the node that every simulated cluster has; environments cost it nothing but their latency."""
ELASTIC = ("http", "https", "lambda", "fc", "ray")
"""Schemes of rewards that run elsewhere, as many at once as are asked for."""


class SimulatedWorker:
    """Implements `protocols.WorkerHandle` over an object of this process."""

    def __init__(self, name: str, built: Any, binding: Binding) -> None:
        self.name = name
        self.built = built
        self.node, self.device_class = binding.node, binding.device_class
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

    def die(self, reason: str) -> bool:
        """What it had in hand is lost. False when it is dead already."""
        if self._death.done():
            return False
        self._death.set_result(reason)
        if isinstance(self.built, SimulatedInference):
            self.built.die(WorkerDied(f"worker {self.name}: {reason}"))
        return True


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
        worker = SimulatedWorker(name, self._build(name, binding), binding)
        self.workers[name] = worker
        return worker

    async def shutdown(self) -> None:
        """End all workers."""
        for worker in self.workers.values():
            worker.die("it was stopped")

    def check(self) -> None:
        """Raises ConfigError where `simulate.prefill` or `faults` name nothing of this run, or where the affinity names
        the class that only prefills. All workers are there.
        """
        classes = list(dict.fromkeys(self.engine_classes().values()))
        if (prefill := self._settings.prefill) and prefill not in classes:
            hint = nearest(prefill, classes)
            raise ConfigError(f"simulate.prefill: no worker of actor_gen is on class {prefill!r}{hint}")
        if classes == [prefill]:
            raise ConfigError(f"simulate.prefill: all workers of actor_gen are on {prefill!r}, and none decodes")
        self._check_affinity(prefill, [name for name in classes if name != prefill])
        pools, origins = accelerators(self._config), list(self.workers)
        for number, fault in enumerate(self._settings.faults):
            key = f"simulate.faults[{number}]"
            known = {"pool": list(pools), "node": list(self._nodes), "worker": origins}
            said = [(kind, name) for kind in known if (name := getattr(fault, kind))]
            if len(said) != 1:
                raise ConfigError(f"{key}: name one of pool, node and worker")
            kind, name = said[0]
            if (name.partition(".")[0] if kind == "worker" else name) not in known[kind]:
                raise ConfigError(f"{key}.{kind}: there is no {kind} {name!r}{nearest(name, known[kind])}")

    def _check_affinity(self, prefill: str, others: list[str]) -> None:
        affinity = self._config.affinity
        for tag, name in affinity.items() if isinstance(affinity, dict) else ():
            if name == prefill:
                raise ConfigError(
                    f"affinity.{toml.key(tag)}: class {name!r} only prefills (simulate.prefill) and serves no task; "
                    f"take {' or '.join(map(repr, others))}, or leave it out"
                )

    def strike(self, fault: FaultConfig) -> str:
        """Let something break, now; what happened, in one line."""
        if fault.worker:
            worker = self.workers.get(fault.worker)
            if worker is None or not worker.die("simulated fault"):
                return f"fault: worker {fault.worker} is not there"
            return f"fault: worker {fault.worker} dies"
        of_pool = accelerators(self._config).get(fault.pool, {})
        gone = [node for node in self._nodes if node == fault.node or node in of_pool]
        if not gone:
            return f"fault: no node of {fault.node or fault.pool} is there"
        for node in gone:
            del self._nodes[node]
        for worker in list(self.workers.values()):
            if worker.node in gone:
                worker.die(f"node {worker.node} is gone")
        return f"fault: {len(gone)} nodes go: {', '.join(gone[:4])}{' ...' if len(gone) > 4 else ''}"

    # --------------------------------------------------------------------------------------------- what it has counted
    def engine_stats(self) -> dict[str, EngineStats]:
        """Counters of every engine that lives or lived."""
        now = asyncio.get_running_loop().time()
        return {name: inference.engine.stats(now) for name, inference in self._engines()}

    def engine_classes(self) -> dict[str, str]:
        """Device class of every engine that lives or lived."""
        return {name: self.workers[name].device_class for name, _ in self._engines()}

    def reward_seconds(self) -> dict[str, tuple[float, float]]:
        """Per device class of the reward workers, seconds that did work and seconds that are paid."""
        found: dict[str, tuple[float, float]] = {}
        for worker in self.workers.values():
            if isinstance(worker.built, SimulatedReward):
                busy_s, paid_s = worker.built.seconds()
                before = found.get(worker.device_class, (0.0, 0.0))
                found[worker.device_class] = (before[0] + busy_s, before[1] + paid_s)
        return found

    def cut_tokens(self) -> int:
        """Tokens generated in turns that did not come to their end."""
        return sum(inference.cut_tokens for _, inference in self._engines())

    def _engines(self) -> Iterator[tuple[str, SimulatedInference]]:
        for name, worker in self.workers.items():
            if isinstance(worker.built, SimulatedInference):
                yield name, worker.built

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
            train_seconds(self._profile, binding.device_class, self._model),
            lambda: self._num_training_devices,
            self._store,
            timeline=self._timeline,
        )


def devices_of(config: Config, name: str) -> dict[str, tuple[int, ...]]:
    """Node -> devices of a pool. Nodes that it names are as it says; a count, `ids` too, is cut into nodes of
    `simulate.devices_per_node` that are called NAME-0, NAME-1 and so on. Raises ConfigError."""
    pool, key = config.pools[name], f"pools.{toml.key(name)}"
    if pool.nodes:
        return {node: indices(f"{key}.nodes.{toml.key(node)}", text) for node, text in pool.nodes.items()}
    size = (config.simulate or SimulateConfig()).devices_per_node
    count = len(indices(f"{key}.ids", pool.ids)) if pool.ids else pool.count
    if not count:
        raise ConfigError(f"{key}.count: a simulated pool says how many devices it has; leave the table out for none")
    firsts = range(0, count, size)
    return {f"{name}-{number}": tuple(range(min(size, count - first))) for number, first in enumerate(firsts)}


def accelerators(config: Config) -> dict[str, dict[str, tuple[int, ...]]]:
    """Pool -> node -> devices, but for pools that are functions, or CPU cores without nodes of their own."""
    return {
        name: devices_of(config, name)
        for name, pool in config.pools.items()
        if not pool.url and (pool.nodes or (pool.device_class or name) != CPU)
    }


def reading_apart(config: Config) -> Config:
    """`roles.prefill` as it is simulated: `simulate.prefill`, a class of actor_gen that only prefills.

    Raises ConfigError where engines that read and engines that decode are on one class, or of different size.
    """
    if "prefill" not in config.roles:
        return config
    simulate = config.simulate or SimulateConfig()
    if simulate.prefill:
        raise ConfigError("simulate.prefill: the table roles.prefill says who reads; keep one of them")
    placed = place(replace(config, engine="embedded"), nodes_of(config), ("actor_gen", "prefill"))
    reading = Counter(each.device_class for each in placed.of_role("prefill"))
    decoding = Counter(each.device_class for each in placed.of_role("actor_gen"))
    if len(reading) > 1 or reading.keys() & decoding.keys():
        raise ConfigError(
            f"roles.prefill: it is on {' and '.join(reading)}, actor_gen on {' and '.join(decoding)}; a simulated run "
            "reads on one class, and decodes on others"
        )
    sizes = {each.num_devices for each in placed.wanted}
    if len(sizes) > 1:
        raise ConfigError("roles.prefill.devices: in a simulated run as many as roles.actor_gen.devices")
    roles = {name: role for name, role in config.roles.items() if name != "prefill"}
    roles["actor_gen"] = RoleConfig(workers=dict(decoding + reading), devices=sizes.pop())
    return replace(config, roles=roles, simulate=replace(simulate, prefill=next(iter(reading))))


def with_nodes(config: Config) -> Config:
    """The same pools, each with the names of its nodes, so that two pools of one class stand on nodes of their own."""
    named = {
        name: replace(config.pools[name], count=0, ids="", nodes={n: ",".join(map(str, d)) for n, d in nodes.items()})
        for name, nodes in accelerators(config).items()
    }
    return replace(config, pools={**config.pools, **named})


def nodes_of(config: Config) -> list[NodeInfo]:
    """Machines that have what `[pools.*]` declares, and one with CPU cores. Raises ConfigError."""
    devices: dict[str, dict[str, int]] = {CPU_NODE: {CPU: CPU_CORES}}
    cuda: dict[str, tuple[str, ...]] = {}
    for name, nodes in accelerators(config).items():
        pool = config.pools[name]
        device_class = pool.device_class or name
        for node, here in nodes.items():
            there = devices.setdefault(node, {})
            there[device_class] = there.get(device_class, 0) + len(here)
            if pool.device != "cpu" and device_class != CPU:
                cuda[node] = (*cuda.get(node, ()), device_class)
    return [NodeInfo(node, there, cuda.get(node, ())) for node, there in devices.items()]


def train_seconds(profile: Profile, device_class: str, model: ModelShape) -> TrainSeconds:
    """As the profile's run measured it, on whatever device, else by the model of the class. Raises ConfigError."""
    if profile.train_s_per_token is not None:
        return measured(profile.train_s_per_token)
    return modelled(Pace(figures(device_class), model, 1, profile.efficiency))


def figures(device_class: str) -> DeviceClass:
    """The figures of a class. Raises ConfigError where there are none."""
    if device_class not in CLASSES:
        raise ConfigError(
            f"simulate: device class {device_class!r} has no figures{nearest(device_class, [*CLASSES])}; declare a "
            "pool of such a class ([pools.NAME] with count = N) and name it in [roles]"
        )
    return CLASSES[device_class]
