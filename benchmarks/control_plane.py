"""What one trajectory turn costs in the control plane, by the number of trajectories that run at once.

Engine and environment answer after one tick of the event loop, so everything that is measured is ours: scheduler, group
book, EnvManager, LLMProxy, routing, buffer. A turn's cost must not depend on how many trajectories run.
"""

from __future__ import annotations

import asyncio
import gc
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from report import parser, publish

from rollart.config import from_dict
from rollart.control.background import Background
from rollart.control.env_manager import Services
from rollart.control.garbage import relax_collector
from rollart.control.ledger import Ledger
from rollart.control.llm_proxy import LLMProxy
from rollart.control.rollout_scheduler import RolloutScheduler
from rollart.control.task_source import TaskSource
from rollart.types import EngineStats, EnvReply, GenRequest, GenResult, ParameterInfo, Sampling, TaskSpec

GROUP_SIZE = 10
NUM_TURNS = 10
NUM_WORKERS = 8
ACTION = [7, 8, 9, 10]


class InstantEngine:
    """Answers every request after one tick."""

    def __init__(self, name: str) -> None:
        self.name = name

    async def generate(self, request: GenRequest) -> GenResult:
        await asyncio.sleep(0)
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
    """Ends every episode after NUM_TURNS steps, each answered after one tick."""

    def __init__(self) -> None:
        self._steps: dict[str, int] = {}

    async def reset(self, env_id: str, task: str, seed: int) -> EnvReply:  # noqa: ARG002
        await asyncio.sleep(0)
        self._steps[env_id] = 0
        return EnvReply("start")

    async def step(self, env_id: str, action: str) -> EnvReply:  # noqa: ARG002
        await asyncio.sleep(0)
        self._steps[env_id] += 1
        return EnvReply("next", 0.1, self._steps[env_id] >= NUM_TURNS)

    async def close(self, env_id: str) -> None:
        self._steps.pop(env_id, None)


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


def scheduler(num_trajectories: int) -> RolloutScheduler:
    """The control plane with exactly `num_trajectories` slots' worth of members, half a batch ahead."""
    groups = num_trajectories // GROUP_SIZE
    rollout = {"groups_per_batch": groups // 2, "group_size": GROUP_SIZE, "zero_variance": "keep"}
    config = from_dict({"alpha": 1.0, "tasks": {"bench": {}}, "rollout": rollout})
    tasks = {"bench": TaskSpec("bench", max_turns=NUM_TURNS + 1)}
    ledger, background = Ledger(), Background()
    proxy = LLMProxy([InstantEngine(f"engine-{n}") for n in range(NUM_WORKERS)], background=background)
    services = Services(InstantEnv(), proxy, FixedRenderer(), Sampling(), background, ledger.clock)

    def fail(error: BaseException) -> None:
        raise error

    return RolloutScheduler(config, tasks, TaskSource(0, tasks), services, ledger, NoRecorder(), fail)


async def microseconds_per_turn(num_trajectories: int, num_turns: int) -> float:
    """Roll out about `num_turns` turns, with a trainer that takes no time; CPU time per turn."""
    rollout = scheduler(num_trajectories)
    batch_turns = num_trajectories // 2 * NUM_TURNS
    num_batches = max(2, num_turns // batch_turns)
    rollout.begin_iteration()
    rollout.trained(await rollout.get_batch())
    began = time.process_time()
    for _ in range(num_batches):
        rollout.trained(await rollout.get_batch())
    seconds = time.process_time() - began
    await rollout.close()
    return seconds / (num_batches * batch_turns) * 1e6


def main() -> None:
    """Print and write the figures."""
    args = parser(__doc__).parse_args()
    num_turns, repeats = (20_000, 1) if args.quick else (300_000, 3)
    rows, summary = [], {}
    relax_collector()
    for num_trajectories in (100, 1_000, 10_000):
        gc.collect()
        runs = [asyncio.run(microseconds_per_turn(num_trajectories, num_turns)) for _ in range(repeats)]
        rows.append({"trajectories": num_trajectories, "us_per_turn": statistics.median(runs), "best": min(runs)})
        summary[f"us_per_turn_{num_trajectories}"] = statistics.median(runs)
    summary["ratio"] = max(summary.values()) / min(summary.values())
    publish("control_plane", rows, summary, args.json)


if __name__ == "__main__":
    main()
