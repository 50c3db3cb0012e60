"""Rewards that only let time pass: a stand-in for `data/reward.py` under a virtual clock.

Invariant: a reserved reward device works on one call at a time, in the order of arrival; elastic rewards never wait.
The score of a trajectory follows from its key, however often it is asked for. What this file leaves out: failures,
limits on calls, and the time limit of one call; the trajectory's own deadline holds, as everywhere.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping

from rollart.data.serverless.meter import Usage, merged
from rollart.data.simulated.episode import has_equal_rewards
from rollart.data.simulated.profile import TaskProfile
from rollart.errors import RewardError
from rollart.types import RewardRequest


class SimulatedReward:
    """`tasks`: profile by name of task. `elastic`: functions that exist while they are called; otherwise one device is
    there from now on, for all tasks. Make it where a loop runs.
    """

    def __init__(self, tasks: Mapping[str, TaskProfile], elastic: bool) -> None:
        self._tasks = tasks
        self._elastic = elastic
        self._usage = {name: Usage() for name in tasks}
        self._began_s = self._free_at_s = asyncio.get_running_loop().time()

    async def score(self, request: RewardRequest) -> float:
        """A number in [0, 1) that follows from the request's key. Raises RewardError."""
        await self._call(request, request.key)
        return self._score(request)

    async def score_group(self, requests: list[RewardRequest]) -> list[float]:
        """One number for each trajectory of a group, in one call. Raises RewardError."""
        await self._call(requests[0], "+".join(request.key for request in requests))
        return [self._score(request) for request in requests]

    async def usage(self) -> dict[str, Usage]:
        """Per task, what its calls took. A reserved device is allocated to its tasks by the work that they gave it."""
        total_s = sum(usage.busy_s for usage in self._usage.values())
        reserved_s = asyncio.get_running_loop().time() - self._began_s
        told = {}
        for name, usage in self._usage.items():
            told[name] = copy = merged([usage])
            if not self._elastic:
                copy.processes = 1
                copy.allocated_s = reserved_s * (usage.busy_s / total_s if total_s else 1 / len(self._usage))
        return told

    def seconds(self) -> tuple[float, float]:
        """Those that did work, and those that are paid: of the device, or of the calls where these are elastic."""
        busy_s = sum(usage.busy_s for usage in self._usage.values())
        if self._elastic:
            return busy_s, sum(usage.allocated_s for usage in self._usage.values())
        return busy_s, asyncio.get_running_loop().time() - self._began_s

    async def shutdown(self) -> None:
        """Nothing is left to end."""

    async def _call(self, request: RewardRequest, key: str) -> None:
        profile = self._tasks.get(request.task)
        if profile is None:
            raise RewardError(f"no reward function for task {request.task!r} here")
        rng = random.Random(f"reward call {request.seed}/{key}")
        busy_s, overhead_s = profile.reward_s.draw(rng), profile.reward_overhead_s.draw(rng)
        usage = self._usage[request.task]
        usage.calls += 1
        usage.tries += 1
        queue_s = self._queue_s(busy_s)
        usage.queue_s += queue_s
        usage.processes += 1
        try:
            await asyncio.sleep(queue_s + busy_s + overhead_s)
        finally:
            usage.processes -= 1
        usage.results += 1
        usage.busy_s += busy_s
        usage.answered(busy_s + overhead_s)
        if self._elastic:  # it exists, and is paid, for the whole call
            usage.allocated_s += busy_s + overhead_s
            usage.billed_s += busy_s + overhead_s

    def _queue_s(self, busy_s: float) -> float:
        """Seconds until the device is free for a call; it then has the device."""
        if self._elastic:
            return 0.0
        now_s = asyncio.get_running_loop().time()
        begin_s = max(now_s, self._free_at_s)
        self._free_at_s = begin_s + busy_s
        return begin_s - now_s

    def _score(self, request: RewardRequest) -> float:
        if has_equal_rewards(self._tasks[request.task], request.seed):
            return 0.0
        return random.Random(f"score {request.seed}/{request.key}").random()
