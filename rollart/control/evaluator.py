"""Greedy episodes on held-out seeds, for each task, through the same EnvManager as training.

Invariant: an evaluation sees one version of the weights; the training loop awaits it before it updates them. What it
leaves out: when to evaluate.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import replace

import msgspec
from msgspec import Struct

from rollart.control.env_manager import EnvManager, Services
from rollart.control.group_scores import GroupScores
from rollart.control.ledger import StageClock
from rollart.control.task_source import TaskSource
from rollart.types import FAILED, TaskSpec, Trajectory


class TaskResult(Struct, frozen=True):
    """Means over the episodes of one task that did not fail; all 0 when every episode failed."""

    episodes: int
    failed: int
    success: float
    reward: float
    turns: float
    tokens: float


class EvalResult(Struct, frozen=True):
    """One evaluation of the weights of `version`."""

    version: int
    tasks: dict[str, TaskResult]
    trajectories: list[Trajectory]


class Evaluator:
    """`concurrency` bounds the episodes that run at once."""

    def __init__(
        self,
        services: Services,
        tasks: Mapping[str, TaskSpec],
        source: TaskSource,
        episodes: int,
        concurrency: int = 64,
    ) -> None:
        greedy = msgspec.structs.replace(services.sampling, temperature=0.0, top_p=1.0, top_k=0)
        alone = GroupScores(services.reward, 1) if services.reward is not None else None
        self._services = replace(services, sampling=greedy, clock=StageClock(), group_scores=alone)
        self._tasks = tasks
        self._source = source
        self._episodes = episodes
        self._concurrency = concurrency

    async def run(self) -> EvalResult:
        """All episodes of all tasks."""
        version = self._services.proxy.version
        free = asyncio.Semaphore(self._concurrency)
        jobs = [(task, n) for task in self._tasks.values() for n in range(self._episodes)]
        async with asyncio.TaskGroup() as group:
            runs = [group.create_task(self._episode(free, version, task, n)) for task, n in jobs]
        trajectories = [run.result() for run in runs]
        results = {name: _summary(self._tasks[name], _of(trajectories, name)) for name in self._tasks}
        return EvalResult(version, results, trajectories)

    async def _episode(self, free: asyncio.Semaphore, version: int, task: TaskSpec, episode: int) -> Trajectory:
        async with free:
            spec = self._source.eval_spec(task.name, episode)
            return await EnvManager(self._services, task, spec, f"eval{version}-{task.name}-{episode}").run()


def _of(trajectories: Iterable[Trajectory], task: str) -> list[Trajectory]:
    return [trajectory for trajectory in trajectories if trajectory.task == task]


def _summary(task: TaskSpec, episodes: list[Trajectory]) -> TaskResult:
    good = [episode for episode in episodes if episode.stop_reason not in FAILED]
    count = max(1, len(good))
    return TaskResult(
        episodes=len(episodes),
        failed=len(episodes) - len(good),
        success=sum(episode.reward >= task.success_reward for episode in good) / count,
        reward=sum(episode.reward for episode in good) / count,
        turns=sum(len(episode.turns) for episode in good) / count,
        tokens=sum(episode.num_generated_tokens for episode in good) / count,
    )
