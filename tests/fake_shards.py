"""Rollout shards that die when told; what is in them is real."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

import msgspec

from rollart.control.background import Background
from rollart.control.env_manager import Services
from rollart.control.group_scores import GroupScores
from rollart.control.ledger import StageClock
from rollart.control.llm_proxy import LLMProxy
from rollart.control.shard import Shard
from rollart.errors import WorkerDied
from rollart.protocols import EnvHandle, InferenceHandle, Renderer, RewardHandle
from rollart.types import EnvReply, GroupSpec, Sampling, ShardNews, StopReason, TaskSpec

T = TypeVar("T")


class MortalEnv:
    """An environment handle in a process that may die: from then on nothing it says is heard."""

    def __init__(self, env: EnvHandle) -> None:
        self.dead = False
        self._env = env

    async def reset(self, env_id: str, task: str, seed: int) -> EnvReply:
        return await self._env.reset(env_id, task, seed)

    async def step(self, env_id: str, action: str) -> EnvReply:
        return await self._env.step(env_id, action)

    async def close(self, env_id: str) -> None:
        if not self.dead:
            await self._env.close(env_id)

    async def give_up(self, env_ids: list[str]) -> None:
        raise AssertionError("only the driver gives up")


class FakeShard:
    """A shard as the driver sees it: a real `Shard`, reached over MessagePack, that dies when told."""

    def __init__(
        self,
        name: str,
        env: EnvHandle,
        engines: Sequence[InferenceHandle],
        renderer: Renderer,
        tasks: dict[str, TaskSpec],
        oldest: int | None,
        reward: RewardHandle | None = None,
        group_size: int = 0,
    ) -> None:
        self.name = name
        self.env, self.background, clock = MortalEnv(env), Background(), StageClock()
        self.proxy = LLMProxy(engines, background=self.background)
        scores = GroupScores(reward, group_size) if reward is not None else None
        services = Services(self.env, self.proxy, renderer, Sampling(), self.background, clock, reward, scores)
        self._shard = Shard(name, services, clock, tasks, oldest)
        self._death = asyncio.Event()

    def die(self) -> None:
        """As by SIGKILL: all that runs in it is gone, and nothing more is heard of it."""
        self.env.dead = True
        self._death.set()
        for _, task in self._shard._runner._running.values():
            task.cancel()

    async def order(self, starts: dict[str, GroupSpec], aborts: dict[str, StopReason]) -> None:
        await self._call(self._shard.order(_moved(starts, dict[str, GroupSpec]), dict(aborts)))

    async def news(self) -> ShardNews:
        return _moved(await self._call(self._shard.news()), ShardNews)

    async def suspend(self) -> ShardNews:
        return _moved(await self._call(self._shard.suspend()), ShardNews)

    async def update(self, version: int) -> None:
        await self._call(self._shard.update(version))

    async def resume(self) -> None:
        await self._call(self._shard.resume())

    async def close(self) -> None:
        await self._call(self._shard.close())

    async def _call(self, work: Coroutine[Any, Any, T]) -> T:
        call, death = asyncio.ensure_future(work), asyncio.ensure_future(self._death.wait())
        try:
            await asyncio.sleep(0.001)
            await asyncio.wait({call, death}, return_when=asyncio.FIRST_COMPLETED)
            if self._death.is_set():
                raise WorkerDied(f"{self.name}: killed by SIGKILL")
            return call.result()
        finally:
            for task in (call, death):
                task.cancel()
            await asyncio.gather(call, death, return_exceptions=True)


def _moved(value: Any, kind: type[T]) -> T:
    return msgspec.msgpack.decode(msgspec.msgpack.encode(value), type=kind)
