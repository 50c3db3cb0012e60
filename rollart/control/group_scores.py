"""Rewards that see a whole group: members wait for each other, then one call scores them all.

Invariants: a call holds exactly `size` trajectories of one group; a member that is cancelled while it waits is not
among them, so its re-run takes its place; every member that waited gets its own number, or the call's error. What this
file leaves out: rewards of single trajectories (`env_manager.py`)."""

from __future__ import annotations

import asyncio

from rollart.protocols import RewardHandle
from rollart.types import RewardRequest

Member = tuple[RewardRequest, "asyncio.Future[float]"]


class GroupScores:
    """`size`: trajectories that a group's score needs; members beyond it wait for their abort."""

    def __init__(self, reward: RewardHandle, size: int) -> None:
        self._reward = reward
        self._size = size
        self._waiting: dict[str, dict[str, Member]] = {}
        self._running: set[asyncio.Task[None]] = set()

    async def score(self, group_id: str, trajectory_id: str, request: RewardRequest) -> float:
        """The number of one member, once all are there. Raises RewardError."""
        future: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        members = self._waiting.setdefault(group_id, {})
        members[trajectory_id] = (request, future)
        if len(members) == self._size:
            del self._waiting[group_id]
            task = asyncio.create_task(self._score(list(members.values())), name=f"score {group_id}")
            self._running.add(task)
            task.add_done_callback(self._running.discard)
        try:
            return await future
        finally:
            if self._waiting.get(group_id) is members:
                members.pop(trajectory_id, None)
                if not members:
                    del self._waiting[group_id]

    async def _score(self, members: list[Member]) -> None:
        try:
            values = await self._reward.score_group([request for request, _ in members])
        except Exception as error:
            for _, future in members:
                if not future.done():
                    future.set_exception(error)
        else:
            for (_, future), value in zip(members, values, strict=True):
                if not future.done():
                    future.set_result(value)
