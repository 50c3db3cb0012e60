"""How much KV an engine keeps of trajectories between two turns: the one left longest ago gives way first.

Invariant: `tokens` is the sum of what is kept. What this file leaves out: whose turn it is (`engines/simulated`).
"""

from __future__ import annotations

from collections import OrderedDict


class Kept:
    """Trajectory -> tokens. `tokens`: of all together."""

    __slots__ = ("_by_trajectory", "tokens")

    def __init__(self) -> None:
        self.tokens = 0
        self._by_trajectory: OrderedDict[str, int] = OrderedDict()

    def put(self, trajectory_id: str, tokens: int) -> None:
        """Keep so many tokens of a trajectory, instead of what was kept of it before."""
        self.take(trajectory_id)
        self._by_trajectory[trajectory_id] = tokens
        self.tokens += tokens

    def take(self, trajectory_id: str) -> int:
        """Hand over what is kept of a trajectory; 0 where that is nothing."""
        tokens = self._by_trajectory.pop(trajectory_id, 0)
        self.tokens -= tokens
        return tokens

    def look(self, trajectory_id: str) -> int:
        """What is kept of a trajectory, untouched."""
        return self._by_trajectory.get(trajectory_id, 0)

    def shrink(self, room: int) -> None:
        """Keep at most `room` tokens."""
        while self.tokens > room and self._by_trajectory:
            self.tokens -= self._by_trajectory.popitem(last=False)[1]

    def clear(self) -> None:
        """Keep nothing."""
        self._by_trajectory.clear()
        self.tokens = 0

    def check(self) -> None:
        """Assert the invariant."""
        assert self.tokens == sum(self._by_trajectory.values())
