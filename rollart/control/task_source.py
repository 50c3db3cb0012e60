"""The data order: which task and seed comes next. PURE.

Invariant: the n-th fresh task of a run is a function of (run seed, n) alone. A task that is queued again takes a new
index but no position, so losses never shift the order of the fresh ones. Held-out seeds and training seeds come from
disjoint ranges. What it leaves out: when a group is admitted (`rollout_scheduler.py`).
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Mapping
from itertools import accumulate
from typing import Any

from rollart.errors import ConfigError
from rollart.types import HELD_OUT, GroupSpec, TaskSpec

NUM_EVAL_SEEDS = 1 << 20


class TaskSource:
    """A weighted mixture of tasks, drawn by counter. Raises ConfigError when no task has a weight above 0."""

    def __init__(self, seed: int, tasks: Mapping[str, TaskSpec], requeue_limit: int = 3) -> None:
        self._seed = seed
        self._all_names = sorted(tasks)
        self._names = [name for name in self._all_names if tasks[name].weight > 0]
        if not self._names:
            raise ConfigError("tasks: every weight is 0; give at least one task a weight above 0")
        self._bounds = list(accumulate(tasks[name].weight for name in self._names))
        self._requeue_limit = requeue_limit
        self._index = 0
        self._position = 0
        self._queue: deque[tuple[str, int]] = deque()
        self._requeues: Counter[tuple[str, int]] = Counter()

    def draw(self, position: int) -> tuple[str, int]:
        """Task and seed of the `position`-th fresh group: pure in (run seed, position)."""
        digest = hashlib.blake2b(f"{self._seed}/{position}".encode(), digest_size=16).digest()
        share = int.from_bytes(digest[:6], "big") / (1 << 48) * self._bounds[-1]
        chosen = min(bisect_right(self._bounds, share), len(self._names) - 1)
        seed = int.from_bytes(digest[8:], "big") % HELD_OUT
        return self._names[chosen], seed

    def eval_spec(self, task: str, episode: int) -> GroupSpec:
        """Held-out episode `episode` of a task, the same in every run. Its index is negative and unique."""
        if not 0 <= episode < NUM_EVAL_SEEDS:
            raise ConfigError(f"eval.episodes: {episode} is more than the {NUM_EVAL_SEEDS} held-out seeds of a task")
        return GroupSpec(-1 - self._all_names.index(task) * NUM_EVAL_SEEDS - episode, task, HELD_OUT + episode)

    def next(self) -> GroupSpec:
        """The next group: one that was queued again, else a fresh one."""
        if self._queue:
            task, seed = self._queue.popleft()
        else:
            task, seed = self.draw(self._position)
            self._position += 1
        self._index += 1
        return GroupSpec(self._index - 1, task, seed)

    def requeue(self, spec: GroupSpec) -> bool:
        """Queue a dropped group's task again; False, and given up, when that has not helped `requeue_limit` times."""
        key = (spec.task, spec.seed)
        if self._requeues[key] >= self._requeue_limit:
            del self._requeues[key]
            return False
        self._requeues[key] += 1
        self._queue.append(key)
        return True

    def settled(self, spec: GroupSpec) -> None:
        """The group was trained: forget how often its task had been queued again."""
        self._requeues.pop((spec.task, spec.seed), None)

    def state(self) -> dict[str, Any]:
        """Plain data that `restore` reads back."""
        return {
            "index": self._index,
            "position": self._position,
            "queue": [[task, seed] for task, seed in self._queue],
            "requeues": [[task, seed, count] for (task, seed), count in self._requeues.items()],
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on where `state` was taken."""
        self._index, self._position = state["index"], state["position"]
        self._queue = deque((task, seed) for task, seed in state["queue"])
        self._requeues = Counter({(task, seed): count for task, seed, count in state["requeues"]})
