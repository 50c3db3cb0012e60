"""Engine, environment and shard that take no time, so that what is measured with them is the control plane alone."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import psutil

from rollart.control.background import Background
from rollart.control.env_manager import Services
from rollart.control.garbage import relax_collector
from rollart.control.ledger import StageClock
from rollart.control.llm_proxy import LLMProxy
from rollart.control.shard import Shard
from rollart.types import EngineStats, EnvReply, GenRequest, GenResult, ParameterInfo, Sampling, TaskSpec

NUM_WORKERS = 8
ACTION = [7, 8, 9, 10]


class Pause:
    """Holds up every trajectory at its turn number `turn` until `end`; negative: none."""

    def __init__(self, turn: int = -1) -> None:
        self.num_held = 0
        self._mark = f"-t{turn}"
        self._over = asyncio.Event()
        self._one_more = asyncio.Event()

    async def at(self, request_id: str) -> None:
        """Wait, where this is the turn."""
        if request_id.endswith(self._mark) and not self._over.is_set():
            self.num_held += 1
            self._one_more.set()
            await self._over.wait()

    async def until(self, number: int) -> None:
        """Wait until so many are held."""
        while self.num_held < number:
            self._one_more.clear()
            await self._one_more.wait()

    def end(self) -> None:
        """Let all go on, and hold nobody any more."""
        self._over.set()


class InstantEngine:
    """Answers every request after one tick."""

    def __init__(self, name: str, pause: Pause | None = None) -> None:
        self.name = name
        self._pause = pause

    async def generate(self, request: GenRequest) -> GenResult:
        await asyncio.sleep(0)
        if self._pause is not None:
            await self._pause.at(request.request_id)
        return GenResult(request.request_id, ACTION, [-0.1] * len(ACTION), [0] * len(ACTION), "stop")

    async def abort(self, request_ids: list[str]) -> None: ...

    async def release(self, trajectory_ids: list[str]) -> None: ...

    async def suspend(self) -> None: ...

    async def prefetch(self, version: int) -> None: ...

    async def update(self, version: int) -> None: ...

    async def resume(self) -> None: ...

    async def logprobs(self, tokens: list[int]) -> list[float]:
        return [0.0] * (len(tokens) - 1)

    async def parameters(self) -> list[ParameterInfo]:
        return []

    async def stats(self) -> EngineStats:
        return EngineStats()


class InstantEnv:
    """Ends every episode after `num_turns` steps, each answered after one tick."""

    def __init__(self, num_turns: int) -> None:
        self._num_turns = num_turns
        self._steps: dict[str, int] = {}

    async def reset(self, env_id: str, task: str, seed: int) -> EnvReply:  # noqa: ARG002
        await asyncio.sleep(0)
        self._steps[env_id] = 0
        return EnvReply("start")

    async def step(self, env_id: str, action: str) -> EnvReply:  # noqa: ARG002
        await asyncio.sleep(0)
        self._steps[env_id] += 1
        return EnvReply("next", 0.1, self._steps[env_id] >= self._num_turns)

    async def close(self, env_id: str) -> None:
        self._steps.pop(env_id, None)

    async def give_up(self, env_ids: list[str]) -> None: ...


class FixedRenderer:
    """Four tokens per observation; rendering itself is not the control plane's cost."""

    stop_token_ids: tuple[int, ...] = (2,)

    def first(self, system_prompt: str, observation: str) -> list[int]:  # noqa: ARG002
        return [1, 3, 4, 5]

    def following(self, observation: str, previous_action: Sequence[int]) -> list[int]:  # noqa: ARG002
        return [2, 3, 4, 5]

    def decode(self, action: Sequence[int]) -> str:  # noqa: ARG002
        return "act"


class NoRecorder:
    """Keeps nothing."""

    def add(self, name: str, value: float) -> None: ...

    def count(self, name: str, value: float = 1) -> None: ...

    def trajectory(self, trajectory: Any, kept: bool) -> None: ...


def services(num_turns: int, clock: StageClock, pause: Pause | None = None) -> Services:
    """Everything that a trajectory calls, in this process."""
    background = Background()
    proxy = LLMProxy([InstantEngine(f"engine-{n}", pause) for n in range(NUM_WORKERS)], background=background)
    return Services(InstantEnv(num_turns), proxy, FixedRenderer(), Sampling(), background, clock)


def tasks(num_turns: int) -> dict[str, TaskSpec]:
    """The one task."""
    return {"bench": TaskSpec("bench", max_turns=num_turns + 1)}


class InstantShard(Shard):
    """A rollout shard with engine and environment inside it."""

    def __init__(self, num_turns: int, paused_turn: int) -> None:
        self._pause, clock = Pause(paused_turn), StageClock()
        super().__init__("", services(num_turns, clock, self._pause), clock, tasks(num_turns), 1)

    async def start(self) -> None:
        """As a real shard."""
        relax_collector()

    async def until_held(self, number: int) -> None:
        """Wait until so many trajectories are at the pause."""
        await self._pause.until(number)

    async def end_pause(self) -> None:
        """Let them go on."""
        self._pause.end()

    async def rss(self) -> int:
        """Bytes of memory of this process."""
        return int(psutil.Process().memory_info().rss)
