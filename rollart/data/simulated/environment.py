"""Environments that only let time pass: a stand-in for `data/environment.py` under a virtual clock.

Invariant: what a caller sees is what an `EnvironmentWorker` would show of an environment that takes the drawn times:
the same errors, the same time limits, and an id that is forgotten once a call on it has failed. An observation is the
text "P R": P tokens to read, R tokens that the policy will answer with; `renderer.py` turns it into tokens.
What this file leaves out: threads and processors; environments never wait for one another.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from msgspec import Struct
from msgspec.structs import replace

from rollart.data.simulated.episode import Episode, draw_episode
from rollart.data.simulated.profile import TaskProfile
from rollart.errors import EnvError, EnvTimeout
from rollart.sections import TaskConfig
from rollart.types import EnvironmentCost, EnvReply


class _Life(Struct):
    task: str
    episode: Episode
    turn: int = 0


class SimulatedEnvironment:
    """All environments of a run. `tasks`: profile by name of task; `configs`: their time limits, by the same names."""

    def __init__(self, tasks: Mapping[str, TaskProfile], configs: Mapping[str, TaskConfig]) -> None:
        self._tasks = tasks
        self._configs = configs
        self._running: dict[str, _Life] = {}
        self._cost = EnvironmentCost()

    async def reset(self, env_id: str, task: str, seed: int) -> EnvReply:
        """Begin the episode of (seed, env_id), in place of any other under this id. Raises EnvTimeout or EnvError."""
        if task not in self._tasks:
            raise EnvError(f"no task {task!r} here; this worker has {', '.join(self._tasks)}")
        episode = draw_episode(self._tasks[task], seed, env_id)
        self._running[env_id] = life = _Life(task, episode)
        self._cost.resets += 1
        await self._pass(env_id, life, "reset", episode.reset_s, self._configs[task].reset_timeout_s)
        if episode.reset_fails:
            self._fail(env_id, life, "reset")
        return EnvReply(_observation(episode, 0))

    async def step(self, env_id: str, action: str) -> EnvReply:  # noqa: ARG002
        """The next turn of the episode, whatever the action; the last one pays, and closes it.

        Raises EnvTimeout or EnvError.
        """
        life = self._running.get(env_id)
        if life is None:
            raise EnvError(f"no environment {env_id!r} here: it was never reset, failed, or is closed")
        turn, episode = life.turn, life.episode
        life.turn += 1
        self._cost.steps += 1
        await self._pass(env_id, life, "step", episode.steps_s[turn], self._configs[life.task].step_timeout_s)
        if turn == episode.failing_step:
            self._fail(env_id, life, "step")
        if life.turn == len(episode.responses):
            self._forget(env_id, life)
            return EnvReply("", episode.reward, terminated=True)
        return EnvReply(_observation(episode, life.turn))

    async def close(self, env_id: str) -> None:
        """End an episode at any point. Never raises; unknown ids are nothing to do."""
        self._running.pop(env_id, None)

    async def give_up(self, env_ids: list[str]) -> None:
        """Close episodes whose owner is dead; unknown ids are nothing to do."""
        for env_id in env_ids:
            self._running.pop(env_id, None)

    async def shutdown(self) -> None:
        """Forget all episodes."""
        self._running.clear()

    async def stats(self) -> dict[str, int]:
        """Environments in use; none is kept, none hangs."""
        return {"running": len(self._running), "idle": 0, "hung": 0}

    async def cost(self) -> EnvironmentCost:
        """Calls so far. They cost no processor time."""
        return replace(self._cost)

    async def _pass(self, env_id: str, life: _Life, what: str, seconds: float, timeout_s: float) -> None:
        if seconds > 0:
            await asyncio.sleep(min(seconds, timeout_s))
        if seconds > timeout_s:
            self._forget(env_id, life)
            raise EnvTimeout(f"{what} of task {life.task!r} did not answer within {timeout_s:g} s")

    def _fail(self, env_id: str, life: _Life, what: str) -> None:
        self._forget(env_id, life)
        raise EnvError(f"{what} of task {life.task!r}: simulated failure")

    def _forget(self, env_id: str, life: _Life) -> None:
        if self._running.get(env_id) is life:
            del self._running[env_id]


def _observation(episode: Episode, turn: int) -> str:
    return f"{episode.prompts[turn]} {episode.responses[turn]}"
