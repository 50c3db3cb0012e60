"""A rollout shard: a worker that hosts EnvManagers, and talks directly to inference, environment and reward workers.

    RolloutShard   what lives in the process: a `control.Shard` over connections to the other workers
    RemoteShard    `protocols.ShardHandle` over a running one, for the driver

Invariant: it calls only workers that it was introduced to (`meet`), and none after it heard or saw that it is dead.
What this file leaves out: which trajectories it runs (`control/sharding.py`), and starting it (`workers.py`).
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping, Sequence
from typing import Any, cast

import msgspec

from rollart.config import Config
from rollart.control.background import Background
from rollart.control.env_manager import Services, sampling_of
from rollart.control.garbage import relax_collector
from rollart.control.group_scores import GroupScores
from rollart.control.ledger import StageClock
from rollart.control.llm_proxy import LLMProxy
from rollart.control.runner import max_age
from rollart.control.shard import Shard
from rollart.data.environment import RemoteEnvironment
from rollart.data.inference import RemoteInference, RemotePrefill
from rollart.data.peers import connect
from rollart.data.reward import RemoteReward
from rollart.errors import WorkerDied
from rollart.protocols import WorkerHandle
from rollart.resource.affinity import Affinity
from rollart.resource.routing import Router
from rollart.tasks import registry
from rollart.tasks.chat import ChatRenderer
from rollart.types import GroupSpec, ShardNews, StopReason

log = logging.getLogger(__name__)


class RolloutShard:
    """Lives in a worker process. `config`: the whole of it, as plain data; `affinity`, `fallback`: as for `Router`."""

    def __init__(
        self,
        config: Mapping[str, Any],
        model_folder: str,
        affinity: Mapping[str, str],
        fallback: Mapping[str, Sequence[str]],
    ) -> None:
        whole = msgspec.convert(config, Config)
        tasks = registry.specs(whole)
        background, clock = Background(), StageClock()
        self._background = background
        slots = whole.rollout.engine_slots
        self._proxy = LLMProxy(
            [],
            router=Router(affinity, fallback, slots=slots),
            background=background,
            affinity=Affinity(affinity, whole.affinity_mode, slots),
            say=self._say,
        )
        self._environment = RemoteEnvironment([])
        self._reward = RemoteReward([])
        self._met: dict[str, WorkerHandle] = {}
        services = Services(
            env=self._environment,
            proxy=self._proxy,
            renderer=ChatRenderer(model_folder),
            sampling=sampling_of(whole),
            background=background,
            clock=clock,
            reward=self._reward if any(task.has_reward for task in tasks.values()) else None,
            group_scores=GroupScores(self._reward, whole.rollout.group_size),
        )
        self._shard = Shard("", services, clock, tasks, max_age(whole))

    async def start(self) -> None:
        """The process holds very many small objects that live long."""
        relax_collector()

    def _say(self, line: str) -> None:
        self._shard.say(line)

    # ------------------------------------------------------------------------------------------------ other workers
    async def meet(self, role: str, name: str, address: str, device_class: str) -> None:
        """Connect to a worker; nothing to do when it is known, or dead by now. An engine holds the weights already."""
        if name in self._met:
            return
        try:
            worker = await connect(name, address)
        except WorkerDied as error:
            log.warning("%s", error)
            return
        self._met[name] = worker
        match role:
            case "actor_gen":
                self._proxy.add(RemoteInference(worker), device_class)
            case "prefill":
                self._proxy.add(RemotePrefill(worker), device_class)
            case "environment":
                self._environment.join(worker)
            case "reward":
                self._reward.join(worker)
            case _:
                raise ValueError(f"a shard has nothing to say to a worker of role {role!r}")

    async def lost(self, name: str) -> None:
        """A worker is dead. Harmless when that is known."""
        self._proxy.lost(name)
        self._environment.lost(name)
        self._reward.lost(name)
        if (worker := self._met.pop(name, None)) is not None:
            self._background.spawn(worker.stop(), f"connection to {name}")

    async def shutdown(self) -> None:
        """Leave the other workers."""
        for worker in self._met.values():
            with contextlib.suppress(OSError):
                await worker.stop()

    # ------------------------------------------------------------------------------ as `protocols.ShardHandle` says
    async def order(self, starts: dict[str, GroupSpec], aborts: dict[str, StopReason]) -> None:
        """Start trajectories by id, abort others."""
        await self._shard.order(starts, aborts)

    async def news(self) -> ShardNews:
        """Wait for something to tell, then tell all of it."""
        return await self._shard.news()

    async def suspend(self) -> ShardNews:
        """No request leaves until `resume`; all news so far."""
        return await self._shard.suspend()

    async def update(self, version: int) -> None:
        """The engines hold `version`."""
        await self._shard.update(version)

    async def resume(self) -> None:
        """Requests may leave."""
        await self._shard.resume()

    async def close(self) -> None:
        """Wait until all trajectories, and what they left to close, have ended."""
        await self._shard.close()


class RemoteShard:
    """`protocols.ShardHandle` over a running worker."""

    def __init__(self, worker: WorkerHandle) -> None:
        self._worker = worker

    @property
    def name(self) -> str:
        """The worker's name."""
        return self._worker.name

    async def order(self, starts: dict[str, GroupSpec], aborts: dict[str, StopReason]) -> None:
        """Start trajectories by id, abort others."""
        await self._worker.call("order", starts, aborts)

    async def news(self) -> ShardNews:
        """Wait for something to tell, then tell all of it."""
        return cast(ShardNews, await self._worker.call("news", returns=ShardNews))

    async def suspend(self) -> ShardNews:
        """No request leaves until `resume`; all news so far."""
        return cast(ShardNews, await self._worker.call("suspend", returns=ShardNews))

    async def update(self, version: int) -> None:
        """The engines hold `version`."""
        await self._worker.call("update", version)

    async def resume(self) -> None:
        """Requests may leave."""
        await self._worker.call("resume")

    async def close(self) -> None:
        """Wait until all trajectories, and what they left to close, have ended."""
        await self._worker.call("close")
