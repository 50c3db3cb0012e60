"""The inside of a rollout shard: EnvManagers of one process, which hears orders and gives news, both in batches.

Invariants: between `suspend` and `resume` no request leaves it; when `suspend` returns, its news tell every start
version so far; each trajectory that was ordered comes back once, among `ended` or `aborted`, unless the process dies.
What this file leaves out: decisions (the driver's), and how the shard reaches other workers (`rollart/shard.py`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from rollart.control.env_manager import Services
from rollart.control.ledger import StageClock
from rollart.control.runner import LocalRunner
from rollart.types import GroupSpec, ShardNews, StopReason, TaskSpec, Trajectory

NEWS_S = 0.01
"""How long news are gathered before they are told, so that a batch is told at the price of one."""


class Shard:
    """Implements `protocols.ShardHandle`. It begins suspended. `clock` must be that of `services`."""

    def __init__(
        self, name: str, services: Services, clock: StageClock, tasks: Mapping[str, TaskSpec], oldest: int | None
    ) -> None:
        self.name = name
        self._services = services
        self._clock = clock
        self._runner = LocalRunner(services, tasks, oldest)
        self._runner.listen(self)
        self._number = 0
        self._progress: dict[str, tuple[int, int]] = {}
        self._ended: list[Trajectory] = []
        self._aborted: list[Trajectory] = []
        self._said: list[str] = []
        self._error: BaseException | None = None
        self._changed = asyncio.Event()
        services.proxy.hold()

    # ------------------------------------------------------------------------------------------ the driver's calls
    async def order(self, starts: dict[str, GroupSpec], aborts: dict[str, StopReason]) -> None:
        """Start trajectories by id, abort others; those that have ended are left alone."""
        for trajectory_id, reason in aborts.items():
            self._runner.abort(trajectory_id, reason)
        for trajectory_id, spec in starts.items():
            self._runner.start(trajectory_id, spec)

    async def news(self) -> ShardNews:
        """Wait for something to tell, then tell all of it. Raises what must end the run."""
        await self._changed.wait()
        await asyncio.sleep(NEWS_S)
        return self._take()

    async def suspend(self) -> ShardNews:
        """No request leaves until `resume`; all news so far."""
        self._services.proxy.hold()
        return self._take()

    async def update(self, version: int) -> None:
        """The engines hold `version`."""
        self._services.proxy.version = version

    async def resume(self) -> None:
        """Requests may leave."""
        self._services.proxy.let_go()

    async def close(self) -> None:
        """Wait until all trajectories, and what they left to close, have ended."""
        await self._runner.close()

    def say(self, line: str) -> None:
        """Something for a person to read, where the driver writes."""
        self._said.append(line)
        self._changed.set()

    # ------------------------------------------------------------------------------------- what its runner tells it
    def progress(self, trajectory_id: str, start_version: int, num_tokens: int) -> None:
        """As `Listener.progress`."""
        self._progress[trajectory_id] = (start_version, num_tokens)
        self._changed.set()

    def ended(self, trajectory: Trajectory) -> None:
        """As `Listener.ended`."""
        self._progress.pop(trajectory.trajectory_id, None)
        self._ended.append(trajectory)
        self._changed.set()

    def aborted(self, trajectory: Trajectory) -> None:
        """As `Listener.aborted`."""
        self._progress.pop(trajectory.trajectory_id, None)
        self._aborted.append(trajectory)
        self._changed.set()

    def failed(self, error: BaseException) -> None:
        """As `Listener.failed`."""
        self._error = error
        self._changed.set()

    def _take(self) -> ShardNews:
        if self._error is not None:
            raise self._error
        self._changed.clear()
        self._number += 1
        counts, stages = self._services.proxy.prefill.counts, dict(self._clock.counts)
        told = self._progress, self._ended, self._aborted, self._said
        news = ShardNews(self._number, stages, *told, counts=dict(counts))
        counts.clear()
        self._progress, self._ended, self._aborted, self._said = {}, [], [], []
        return news
