"""The workers of a run: placed on pools, started as Clusters, and replaced when they die.

Invariant: every worker stands on a binding that this run holds, and gives it back when it is gone for good. A worker
that dies is started again on the same binding, after `MAX_RESTARTS` deaths or with its node elsewhere; one whose
devices another run has got is ended, and started on others. The death of the trainer ends the run; so does a role
without any worker left, but not before a checkpoint is made. What this file leaves out: when a worker counts as dead
(`control/supervisor.py`) and what becomes of the requests it held (`control/llm_proxy.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from rollart.config import GROUPS, Config, server_urls, serverless_of, to_dict
from rollart.control.background import Background
from rollart.control.llm_proxy import LLMProxy
from rollart.control.sharding import ShardedRunner
from rollart.data.cluster import Member, spawn
from rollart.data.devices import check_devices
from rollart.data.environment import RemoteEnvironment
from rollart.data.inference import RemoteInference, RemotePrefill
from rollart.data.reward import RemoteReward
from rollart.data.runtime import open_runtime
from rollart.data.training import RemoteTrainer, form_group
from rollart.data.weights_folder import SHARED_MEMORY, WeightsFolder, sweep_stale
from rollart.errors import ResourceError, RollartError, ServerAway, WorkerDied
from rollart.protocols import Addressed, Losable, Runtime, WorkerHandle
from rollart.resource.manager import ResourceManager
from rollart.resource.placement import Placement, place
from rollart.resource.routing import Router
from rollart.resource.store import open_store
from rollart.shard import RemoteShard
from rollart.tasks.registry import reward_scheme
from rollart.types import Binding, EnvironmentCost, NodeInfo, TaskSpec

TARGETS = {
    "actor_gen": "rollart.data.roles:inference",
    "prefill": "rollart.data.roles:inference",
    "environment": "rollart.data.roles:environment",
    "reward": "rollart.data.roles:reward",
    "actor_train": "rollart.data.roles:training",
    "rollout": "rollart.shard:RolloutShard",
}
MET = ("actor_gen", "prefill", "environment", "reward")
"""Roles whose workers a rollout shard talks to."""
MAX_RESTARTS = 3
"""Deaths of one worker within `RESTART_WINDOW_S` after which its devices are at fault."""
RESTART_WINDOW_S = 600.0
LOOPBACK = "127.0.0.1"


class Resources(Struct, frozen=True):
    """What `summary.json` says of the resources: device class per worker, what was lost, who was started again, and
    what was decided about their number.
    """

    workers: dict[str, str]
    fell_back: dict[str, str]
    lost: list[str]
    restarts: dict[str, int]
    decisions: list[str] = msgspec.field(default_factory=list)


@dataclass
class Workers:
    """The workers of a run by role. `environment`, `reward` and `trainer` are what control calls."""

    runtime: Runtime
    resources: ResourceManager
    placement: Placement
    recipes: Mapping[str, Callable[[Binding], dict[str, Any]]]
    members: dict[str, Member]
    say: Callable[[str], None]
    trainers: list[WorkerHandle]
    """The ranks of the trainer, in order; none in an evaluation."""
    environment: RemoteEnvironment = field(init=False)
    reward: RemoteReward | None = field(init=False)
    trainer: RemoteTrainer | None = field(init=False)
    proxy: LLMProxy | None = field(default=None, init=False)
    runner: ShardedRunner | None = field(default=None, init=False)
    restarts: Counter[str] = field(default_factory=Counter, init=False)
    decisions: list[str] = field(default_factory=list, init=False)
    end: Callable[[RollartError], None] | None = field(default=None, init=False)
    """Ends the training with an error once it has saved a checkpoint; None while nothing is trained."""
    num_environments: int = field(init=False)
    """Environment workers ever started, successors of dead ones not counted."""
    _deaths: dict[str, list[float]] = field(default_factory=dict, init=False)
    _ending: bool = field(default=False, init=False)
    _background: Background = field(default_factory=Background, init=False)

    def __post_init__(self) -> None:
        reward = self.of_role("reward")
        self.environment = RemoteEnvironment([member.handle for member in self.of_role("environment")])
        self.reward = RemoteReward([member.handle for member in reward]) if reward else None
        self.num_environments = len(self.of_role("environment"))
        self.resources.on_taken = self._leave
        self.trainer = RemoteTrainer(*self.trainers, say=self.say) if self.trainers else None

    def of_role(self, role: str) -> list[Member]:
        """Those that are alive."""
        return [member for member in self.members.values() if member.binding.role == role]

    @property
    def handles(self) -> list[WorkerHandle]:
        """All workers."""
        return [member.handle for member in self.members.values()]

    def router(self, slots: int, reserved: Collection[str] = ()) -> Router:
        """Routing by the affinity of the run; `slots`, `reserved`: as `Router` takes them."""
        return Router(self.placement.affinity, self.placement.fallback, slots=slots, reserved=reserved)

    @property
    def classes(self) -> dict[str, str]:
        """Device class of each worker."""
        return {member.name: member.binding.device_class for member in self.members.values()}

    def inference(self) -> list[RemoteInference]:
        """The inference workers, and after them those that read prompts for others."""
        decoding = [RemoteInference(member.handle) for member in self.of_role("actor_gen")]
        return [*decoding, *(RemotePrefill(member.handle) for member in self.of_role("prefill"))]

    def report(self) -> Resources:
        """For the summary."""
        held = {member.name: member.binding for member in self.members.values()}
        return Resources(
            workers={name: str(each) for name, each in held.items()},
            fell_back={n: f"{each.asked_class} -> {each.device_class}" for n, each in held.items() if each.fell_back},
            lost=self.resources.lost,
            restarts=dict(self.restarts),
            decisions=list(self.decisions),
        )

    # ------------------------------------------------------------------------------------------ environment workers
    async def environment_costs(self) -> dict[str, EnvironmentCost]:
        """Per living environment worker, its counters."""
        members = self.of_role("environment")
        calls = (member.handle.call("cost", returns=EnvironmentCost) for member in members)
        answers = await asyncio.gather(*calls, return_exceptions=True)
        return {
            member.name: answer
            for member, answer in zip(members, answers, strict=True)
            if isinstance(answer, EnvironmentCost)
        }

    async def free_cores(self) -> int:
        """Cores of the environments' class without a worker, counting those of other runs, and the driver as one."""
        class_name = self.placement.of_role("environment")[0].device_class
        rows = [row for row in await self.resources.rows() if row.device_class == class_name]
        return sum(row.total - row.failed - len(row.holders) for row in rows) - 1

    async def add_environment(self) -> WorkerHandle:
        """Start one more environment worker, on the node with most room. Raises RollartError."""
        model = self.placement.of_role("environment")[0]
        self.num_environments += 1
        name = f"environment-{self.num_environments - 1}"
        binding = await self.resources.bind(name, model.role, model.device_class, model.num_devices)
        return (await self._start(name, binding)).handle

    def decide(self, line: str) -> None:
        """Tell of a decision, and keep it for the summary."""
        self.decisions.append(line)
        self.say(line)

    # ---------------------------------------------------------------------------------------------------- recovery
    async def recover(self, worker: WorkerHandle, reason: str) -> WorkerHandle | None:
        """Replace a dead worker; None when the run goes on without. Raises what ends the run."""
        dead = self.members.pop(worker.name)
        role = dead.binding.role
        self._forget(dead)
        if role in MET:
            await self._tell_lost(worker.name)
        if role == "actor_train":
            raise WorkerDied(f"worker {worker.name!r} died: {reason}")
        self.say(f"worker {worker.name} died: {reason.splitlines()[0]}")
        if self._ending:
            return None
        origin = worker.name.partition(".")[0]
        deaths = self._recent_deaths(origin)
        while True:
            self.restarts[origin] += 1
            alone = not self.of_role(role)
            try:
                binding = await self._new_binding(dead.binding, deaths)
            except ResourceError as error:
                if not self.of_role(role) and role != "prefill":  # without it, others read
                    self._end(WorkerDied(f"worker {worker.name!r} died: {reason}; nothing takes its place: {error}"))
                else:
                    self.say(f"going on without {origin}: {error}")
                return None
            name = f"{origin}.{self.restarts[origin]}"
            try:
                member = await self._start(name, binding)
            except ServerAway as error:  # nobody died
                if alone and not self.of_role(role):
                    self._end(WorkerDied(f"worker {worker.name!r} died: {reason}; nothing takes its place: {error}"))
                    return None
                self.say(f"{name} waits for its server: {str(error).splitlines()[0]}")
                dead = Member(dead.handle, binding)
                continue
            except RollartError as error:
                self.say(f"{name} could not be started on {binding}: {str(error).splitlines()[0]}")
                dead, deaths = Member(dead.handle, binding), self._recent_deaths(origin)
                continue
            self.say(f"{name} runs on {binding} in its place")
            return member.handle

    def _recent_deaths(self, origin: str) -> int:
        now = asyncio.get_running_loop().time()
        recent = [when for when in self._deaths.get(origin, []) if now - when < RESTART_WINDOW_S]
        self._deaths[origin] = [*recent, now]
        return len(self._deaths[origin])

    async def _new_binding(self, old: Binding, deaths: int) -> Binding:
        """The same devices, unless their node is gone or they failed too often; then others. Raises ResourceError."""
        nodes = {node.name for node in await self.runtime.nodes()}
        if old.node not in nodes:
            await self.resources.fail_node(old.node)
        elif not await self.resources.is_ours(old):
            await self.resources.release(old)
        elif deaths <= MAX_RESTARTS:
            return old
        elif old.share > 1:  # others work on the same devices: it is not they that are broken
            await self.resources.release(old)
            raise ResourceError(f"it died {deaths} times within {RESTART_WINDOW_S:g} s")
        else:
            await self.resources.fail(old)
        return await self.resources.bind(old.worker, old.role, old.asked_class, len(old.devices))

    def _leave(self, binding: Binding, run: str) -> None:
        """Another run has got the devices of a binding: its worker ends, the trainer's not before a checkpoint."""
        for member in self.members.values():
            if member.binding == binding:
                if binding.role == "actor_train" and self.end is not None:
                    self._end(ResourceError(f"{binding}, on which {member.name} trains, has gone to run {run!r}"))
                else:
                    self._background.spawn(member.handle.stop(), f"end of {member.name}")

    async def watch_runtime(self) -> None:
        """End the training while workers still answer, when the runtime is lost."""
        if isinstance(self.runtime, Losable):
            self._end(ResourceError(await self.runtime.wait_lost()))

    def _end(self, error: RollartError) -> None:
        """Nobody is replaced any more."""
        if self.end is None:
            raise error
        self._ending = True
        self.say(f"ending after this step, with a checkpoint: {str(error).splitlines()[0]}")
        self.end(error)

    async def _start(self, name: str, binding: Binding) -> Member:
        named = msgspec.structs.replace(binding, binding_id=f"{binding.run}/{name}")
        recipe = self.recipes[binding.role](named)
        handle = await self.runtime.spawn(name, TARGETS[binding.role], recipe, binding)
        member = Member(handle, binding)
        try:
            if binding not in self.resources.bindings:
                raise ResourceError(f"another run has got {binding} while {name} started there")
            await self._take_in(member)
        except RollartError:
            self.members.pop(name, None)
            self._forget(member)
            await handle.stop()
            raise
        return member

    async def _take_in(self, member: Member) -> None:
        """Give a new worker its share of the work. Raises what its calls raise."""
        handle, binding = member.handle, member.binding
        match binding.role:
            case "actor_gen" if self.proxy is not None:
                await self.proxy.join(RemoteInference(handle), binding.device_class)
            case "prefill":
                await self.tell_address(member)
                if self.proxy is not None:
                    await self.proxy.join(RemotePrefill(handle), binding.device_class)
            case "environment":
                self.environment.join(handle)
            case "reward" if self.reward is not None:
                self.reward.join(handle)
            case _:
                pass
        self.members[member.name] = member
        await self.introduce(member)
        if binding.role == "rollout" and self.runner is not None:
            await self.runner.join(RemoteShard(handle))

    async def tell_address(self, member: Member) -> None:
        """A worker that reads for others learns where these can ask it for what it has read, if they can at all."""
        if isinstance(member.handle, Addressed):
            await member.handle.call("listen_at", await member.handle.address())

    async def introduce(self, member: Member) -> None:
        """Let a new shard meet all others, and a new worker all shards. Raises ResourceError, WorkerDied."""
        role = member.binding.role
        if role == "rollout":
            others = [other for each in MET for other in self.of_role(each)]
            await asyncio.gather(*(self._meet(member, other) for other in others))
        elif role in MET:
            meetings = (self._meet(shard, member) for shard in self.of_role("rollout"))
            for answer in await asyncio.gather(*meetings, return_exceptions=True):
                if isinstance(answer, BaseException) and not isinstance(answer, WorkerDied):
                    raise answer

    async def _meet(self, shard: Member, other: Member) -> None:
        """A worker that is dead is not met: its successor will be."""
        if not isinstance(other.handle, Addressed):
            raise ResourceError(
                f"worker {other.name}: the workers of this runtime cannot call each other, which rollout shards need; "
                "raise rollout.shard_trajectories"
            )
        try:
            address = await other.handle.address()
        except WorkerDied:
            return
        binding = other.binding
        await shard.handle.call("meet", binding.role, other.name, address, binding.device_class)

    async def _tell_lost(self, name: str) -> None:
        """Shards may not have noticed yet."""
        shards = self.of_role("rollout")
        await asyncio.gather(*(shard.handle.call("lost", name) for shard in shards), return_exceptions=True)

    def _forget(self, dead: Member) -> None:
        match dead.binding.role:
            case "actor_gen" | "prefill" if self.proxy is not None:
                self.proxy.lost(dead.name)
            case "environment":
                self.environment.lost(dead.name)
            case "reward" if self.reward is not None:
                self.reward.lost(dead.name)
            case "rollout" if self.runner is not None:
                self.runner.lost(dead.name)
            case _:
                pass


@contextlib.asynccontextmanager
async def started(
    config: Config,
    run: str,
    logs: Path,
    specs: Mapping[str, TaskSpec],
    model: Path,
    weights: Mapping[str, Any],
    train: bool,
    say: Callable[[str], None],
    runtime: Runtime | None = None,
) -> AsyncIterator[Workers]:
    """Place and start all workers of a run, at once; end them and give their devices back on every way out.

    `runtime`: default that of the config. Raises ConfigError or ResourceError before anything starts, then whatever a
    worker's construction raised.
    """
    async with contextlib.AsyncExitStack() as stack:
        is_real, runtime = runtime is None, runtime or open_runtime(config.runtime, logs)
        parcels = stack.enter_context(_parcels(config, run)) if weights else ""
        stack.push_async_callback(_shielded, runtime.shutdown)
        settings = config.resources
        nodes = await runtime.nodes()
        placement = place(config, nodes, _roles(specs, train))
        if is_real:
            check_devices(config, placement)
        store = open_store(settings.store)
        resources = ResourceManager(store, placement.pools, run, name=settings.name, lease_s=settings.lease_s, warn=say)
        await resources.open()
        stack.push_async_callback(_shielded, resources.close)
        stack.push_async_callback(_shielded, runtime.shutdown)
        bindings = await resources.bind_all(placement.wanted)
        recipes = _recipes(config, model, dict(weights), placement, parcels)
        wanted = [(each, TARGETS[each.role], recipes[each.role](each)) for each in bindings]
        members = await spawn(runtime, wanted, say=say)
        trainers = await _trainers(config, [each for each in members if each.binding.role == "actor_train"], nodes)
        by_name = {member.name: member for member in members}
        workers = Workers(runtime, resources, placement, recipes, by_name, say, trainers)
        if lost := [each for each in bindings if each not in resources.bindings]:
            raise ResourceError(f"another run has got {lost[0]} while the workers started")
        await asyncio.gather(*(workers.tell_address(each) for each in workers.of_role("prefill")))
        await asyncio.gather(*(workers.introduce(shard) for shard in workers.of_role("rollout")))
        yield workers


async def _trainers(config: Config, members: list[Member], nodes: Sequence[NodeInfo]) -> list[WorkerHandle]:
    """The workers that train together, in the order of their ranks, once they have met: neighbours share a node.

    What is simulated trains as one. Raises what `form_group` raises.
    """
    if config.trainer not in GROUPS or not members:
        return [member.handle for member in members[:1]]
    members = sorted(members, key=lambda member: (member.binding.node, member.binding.devices))
    addresses = {node.name: node.address for node in nodes}
    homes = [member.binding.node for member in members]
    hosts = [addresses[home] if len(set(homes)) > 1 else LOOPBACK for home in homes]
    handles = [member.handle for member in members]
    await form_group(handles, hosts)
    return handles


async def _shielded(close: Callable[[], Any]) -> None:
    await asyncio.shield(close())


@contextlib.contextmanager
def _parcels(config: Config, run: str) -> Iterator[str]:
    """The folder in shared memory through which KV goes from worker to worker; "" where there is none, or need of it.

    Raises WeightsError.
    """
    if "prefill" not in config.roles or config.runtime == "ray" or not os.access(SHARED_MEMORY, os.W_OK):
        yield ""
        return
    sweep_stale(SHARED_MEMORY)
    with WeightsFolder(SHARED_MEMORY, f"kv-{run}") as folder:
        yield str(folder.path)


def _roles(specs: Mapping[str, TaskSpec], train: bool) -> list[str]:
    roles = ["actor_gen", "prefill", "environment"]
    if any(spec.has_reward for spec in specs.values()):
        roles.append("reward")
    return [*roles, "rollout", "actor_train"] if train else roles


def _recipes(
    config: Config, model: Path, weights: dict[str, Any], placement: Placement, parcels: str
) -> dict[str, Callable[[Binding], dict[str, Any]]]:
    """Per role, the arguments of its function in `data/roles.py` for a worker on a binding."""
    rollout = config.rollout
    tasks = {name: msgspec.to_builtins(task) for name, task in config.tasks.items()}
    hosted = {"tasks": tasks, "num_threads": rollout.env_threads}
    engine_options: dict[str, Any] = {
        "slots": rollout.engine_slots,
        "max_model_tokens": rollout.max_model_tokens,
        "seed": config.seed,
    }

    if config.train.lora.r:
        engine_options["lora"] = msgspec.to_builtins(config.train.lora)

    def on(binding: Binding) -> dict[str, Any]:
        own: dict[str, Any] = {"device": binding.device}
        if config.engine == "emulated":
            own["device_class"] = binding.device_class
        elif config.engine == "vllm":
            own["tensor_parallel_size"] = len(binding.devices)
            own["hands_over"] = "prefill" in config.roles
        elif config.engine == "http":
            own = {"url": server_urls(config)[_number(binding.worker)]}
            if "." not in binding.worker:  # only in place of a dead one it waits for its server
                own["away_s"] = 0.0
        given = {name: value for name, value in config.engine_options.items() if name != "urls"}
        return {**given, **engine_options, **own}

    def generating(binding: Binding, part: str) -> dict[str, Any]:
        made = {"model_folder": str(model), "engine": config.engine, "engine_options": on(binding), "weights": weights}
        return {**made, "part": part, "parcels": parcels} if part else made

    decode = "decode" if "prefill" in config.roles else ""
    return {
        "actor_gen": lambda binding: generating(binding, decode),
        "prefill": lambda binding: generating(binding, "prefill"),
        "environment": lambda _: hosted,
        "reward": lambda _: {
            "tasks": tasks,
            "serverless": {name: msgspec.to_builtins(serverless_of(config, name)) for name in tasks},
            "scheme": reward_scheme(config),
        },
        "rollout": lambda _: {
            "config": to_dict(config),
            "model_folder": str(model),
            "affinity": placement.affinity,
            "fallback": {name: list(others) for name, others in placement.fallback.items()},
        },
        "actor_train": lambda binding: {
            "model_folder": str(model),
            "trainer": config.trainer,
            "options": msgspec.to_builtins(config.train),
            "device": binding.device,
            "temperature": rollout.temperature,
            "seed": config.seed,
            "weights": weights,
        },
    }


def _number(worker: str) -> int:
    """Of a worker within its role, also when it was started again: 3 of inference-3.1."""
    return int(worker.rpartition("-")[2].partition(".")[0])
