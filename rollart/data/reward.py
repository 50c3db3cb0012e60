"""Reward workers: score finished trajectories off the critical path.

Invariant: a reward function's fault (hang, exception, exit, NaN, None) is a `RewardError` of that one call. What this
file leaves out: the functions (`tasks/rewards.py`, or the user's own), and where they run when not in a worker.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Any, cast

import msgspec

from rollart.config import TaskConfig
from rollart.data.living import LivingWorkers
from rollart.errors import RewardError, WorkerDied, WorkerError
from rollart.protocols import RewardFunction
from rollart.tasks import replies
from rollart.tasks.lane import Lane
from rollart.tasks.registry import reward_function
from rollart.types import RewardRequest

log = logging.getLogger(__name__)


class RewardWorker:
    """Lives in a worker process. `tasks`: TaskConfig by name, as plain data; `num_threads`: calls that run at once.

    Raises ConfigError when a reward function cannot be imported.
    """

    def __init__(self, tasks: Mapping[str, Mapping[str, Any]], num_threads: int) -> None:
        self._configs = {name: msgspec.convert(task, TaskConfig) for name, task in tasks.items()}
        self._functions = {name: reward_function(config, name) for name, config in self._configs.items()}
        self._permits = asyncio.Semaphore(num_threads)
        self._idle: list[Lane] = []

    async def score(self, request: RewardRequest) -> float:
        """One finite number for one trajectory. Raises RewardError."""
        function = self._functions.get(request.task)
        if function is None:
            raise RewardError(f"no reward function for task {request.task!r} here")
        async with self._permits:
            return await self._score(function, request, self._configs[request.task].reward_timeout_s)

    async def _score(self, function: RewardFunction, request: RewardRequest, timeout_s: float) -> float:
        what = f"reward of task {request.task!r}"
        lane = self._idle.pop() if self._idle else Lane("reward")
        future = lane.submit(RewardError, what, lambda: replies.score(function(request), what))
        try:
            async with asyncio.timeout(timeout_s):
                return await asyncio.wrap_future(future)
        except TimeoutError:
            log.warning("%s did not answer within %g s; its thread is abandoned", what, timeout_s)
            raise RewardError(f"{what} did not answer within {timeout_s:g} s") from None
        finally:
            if future.done():
                self._idle.append(lane)
            else:
                lane.end()


class RemoteReward(LivingWorkers):
    """`protocols.RewardHandle` over reward workers: the least busy one; scoring is repeated when its worker dies."""

    async def score(self, request: RewardRequest) -> float:
        """As `RewardWorker.score`; waits while there is no worker."""
        while True:
            worker = await self._least_loaded()
            self._load[worker.name] += 1
            try:
                return cast(float, await worker.call("score", request, returns=float))
            except WorkerDied:
                self.lost(worker.name)
            except WorkerError as error:
                raise RewardError(f"score on worker {worker.name}: {error}") from error
            finally:
                self._load[worker.name] -= 1
