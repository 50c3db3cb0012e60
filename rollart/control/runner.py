"""Who runs trajectories: the seam between the scheduler, which decides, and whatever hosts EnvManagers.

Invariants: a trajectory that was started ends exactly once, as `ended` or, after an `abort`, as `aborted`; an abort
cancels its EnvManager, which closes its environment and aborts its request in the engine; after `close` nothing runs.
What this file leaves out: hosting in other processes (`sharding.py`, `shard.py`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from functools import partial
from typing import Protocol

from rollart.config import Config
from rollart.control.env_manager import EnvManager, Services
from rollart.control.lockstep import Lockstep
from rollart.control.staleness import Staleness
from rollart.errors import RolloutError
from rollart.types import GroupSpec, StopReason, TaskSpec, Trajectory

DRAIN_S = 10.0


class Listener(Protocol):
    """Who hears of trajectories."""

    def progress(self, trajectory_id: str, start_version: int, num_tokens: int) -> None:
        """It asks for its first generation (`start_version` is then a lower bound), or has ended a turn."""
        ...

    def ended(self, trajectory: Trajectory) -> None:
        """It has ended by itself, or with the process that ran it."""
        ...

    def aborted(self, trajectory: Trajectory) -> None:
        """It was aborted; this is what it had by then."""
        ...

    def failed(self, error: BaseException) -> None:
        """Something that no trajectory can carry: the run must end."""
        ...


class Runner(Protocol):
    """Runs trajectories for one listener."""

    def listen(self, listener: Listener) -> None:
        """Called once, before the first start."""
        ...

    def start(self, trajectory_id: str, spec: GroupSpec) -> None:
        """Run one trajectory."""
        ...

    def abort(self, trajectory_id: str, reason: StopReason) -> None:
        """End it; `aborted` follows, at once or later."""
        ...

    async def close(self) -> None:
        """Wait until all that was started has ended, and what it left to close is closed. Abort first."""
        ...


def max_age(config: Config) -> int | None:
    """The age beyond which no turn begins, or None where the schedule checks none."""
    if config.plan.recheck != "turn":
        return None
    return Staleness.of(config.effective_alpha, config.rollout.groups_per_batch).oldest


class LocalRunner:
    """Trajectories as tasks of the running loop. `oldest`: see `max_age`.

    lockstep: environments step together; with `score_together` also scored only when all have ended.
    """

    def __init__(
        self,
        services: Services,
        tasks: Mapping[str, TaskSpec],
        oldest: int | None,
        lockstep: Lockstep | None = None,
        score_together: bool = False,
    ) -> None:
        self._services = services
        self._tasks = tasks
        self._oldest = oldest
        self._lockstep = lockstep
        self._score_together = score_together
        self._listener: Listener
        self._running: dict[str, tuple[EnvManager, asyncio.Task[Trajectory]]] = {}
        self._ending: set[asyncio.Task[Trajectory]] = set()

    def listen(self, listener: Listener) -> None:
        """Called once, before the first start."""
        self._listener = listener

    def start(self, trajectory_id: str, spec: GroupSpec) -> None:
        """Run one trajectory."""
        if self._lockstep is not None:
            self._lockstep.join(trajectory_id)
        manager = EnvManager(
            self._services,
            self._tasks[spec.task],
            spec,
            trajectory_id,
            max_age=self._oldest,
            progress=self._listener.progress,
            lockstep=self._lockstep,
            score_together=self._score_together,
        )
        task = asyncio.get_running_loop().create_task(manager.run(), name=trajectory_id)
        self._running[trajectory_id] = (manager, task)
        self._ending.add(task)
        task.add_done_callback(partial(self._ended, trajectory_id))

    def abort(self, trajectory_id: str, reason: StopReason) -> None:
        """Cancel it. Harmless when it has ended."""
        if (found := self._running.pop(trajectory_id, None)) is not None:
            manager, task = found
            task.cancel()
            manager.trajectory.stop_reason = reason
            self._listener.aborted(manager.trajectory)

    async def close(self) -> None:
        """Wait until all tasks, and what they left to close, have ended."""
        while self._ending:
            await asyncio.wait(set(self._ending))
        await self._services.background.drain(DRAIN_S)

    def _ended(self, trajectory_id: str, task: asyncio.Task[Trajectory]) -> None:
        """A task is over: of itself, or because it was aborted (then the listener knows already)."""
        self._ending.discard(task)
        if self._lockstep is not None:
            self._lockstep.leave(trajectory_id)
        if self._running.pop(trajectory_id, None) is None:
            return
        try:
            self._listener.ended(task.result())
        except asyncio.CancelledError:
            text = f"trajectory {trajectory_id} was cancelled by something outside the scheduler"
            self._listener.failed(RolloutError(text))
        except Exception as error:
            self._listener.failed(error)
