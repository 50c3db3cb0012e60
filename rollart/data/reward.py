"""Reward workers: score finished trajectories off the critical path, each by its task's function behind a URL.

Invariant: a reward function's fault (hang, exception, exit, NaN, None, wrong shape) is a `RewardError` of that one
call, and one trajectory gets one score however often it is asked for. What this file leaves out: the functions
(`rollart.rewards`, or the user's own), and where they run (`serverless/`)."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from typing import Any, cast

import msgspec

from rollart.data.living import LivingWorkers
from rollart.data.serverless.endpoint import EndpointOptions
from rollart.data.serverless.function import CallPolicy, Function
from rollart.data.serverless.meter import Usage, merged
from rollart.data.serverless.registry import open_function
from rollart.errors import FunctionError, RewardError, WorkerDied, WorkerError
from rollart.protocols import WorkerHandle
from rollart.sections import ServerlessConfig, TaskConfig
from rollart.tasks import replies
from rollart.tasks.registry import reward_url
from rollart.types import RewardRequest

TELL_TIMEOUT_S = 2.0


class RewardWorker:
    """Lives in a worker process. `tasks`: TaskConfig by name; `serverless`: ServerlessConfig by name; as plain data.

    `scheme`: of functions that are named without one. Raises ConfigError when a function cannot be found.
    """

    def __init__(
        self,
        tasks: Mapping[str, Mapping[str, Any]],
        serverless: Mapping[str, Mapping[str, Any]] | None = None,
        scheme: str = "local",
    ) -> None:
        configs = {name: msgspec.convert(task, TaskConfig) for name, task in tasks.items()}
        tables = {name: msgspec.convert(table, ServerlessConfig) for name, table in (serverless or {}).items()}
        self._functions: dict[str, Function] = {}
        for name, config in configs.items():
            if url := reward_url(config, name, scheme):
                table = tables.get(name, ServerlessConfig())
                self._functions[name] = _open(name, url if "://" in url else f"{scheme}://{url}", config, table)

    async def score(self, request: RewardRequest) -> float:
        """One finite number for one trajectory. Raises RewardError."""
        what = f"reward of task {request.task!r}"
        return replies.score(await self._call(request.task, request, key=request.key), what)

    async def score_group(self, requests: list[RewardRequest]) -> list[float]:
        """One finite number for each trajectory of a group, by a function that sees them all. Raises RewardError."""
        what = f"reward of a group of task {requests[0].task!r}"
        key = "+".join(request.key for request in requests) if all(request.key for request in requests) else ""
        values = await self._call(requests[0].task, requests, key=key)
        if not isinstance(values, list) or len(values) != len(requests):
            raise RewardError(f"{what} returned {replies.shown(values)}; expected a list of {len(requests)} numbers")
        return [replies.score(value, what) for value in values]

    async def usage(self) -> dict[str, Usage]:
        """Per task, what its calls took and cost."""
        return {name: function.usage() for name, function in self._functions.items()}

    async def shutdown(self) -> None:
        """End all that runs for the functions."""
        for function in self._functions.values():
            await function.close()

    async def _call(self, task: str, argument: Any, key: str) -> Any:
        if (function := self._functions.get(task)) is None:
            raise RewardError(f"no reward function for task {task!r} here")
        try:
            return await function.call(msgspec.to_builtins(argument), key=key)
        except FunctionError as error:
            wrapped = RewardError(str(error))
            for note in getattr(error, "__notes__", ()):
                wrapped.add_note(note)
            raise wrapped from error


def _open(name: str, url: str, config: TaskConfig, table: ServerlessConfig) -> Function:
    policy = CallPolicy(
        timeout_s=config.reward_timeout_s,
        **{key: getattr(table, key) for key in CallPolicy.__struct_fields__ if hasattr(table, key)},
    )
    options = EndpointOptions(
        arguments=dict(config.reward_options),
        **{key: getattr(table, key) for key in EndpointOptions.__struct_fields__ if hasattr(table, key)},
    )
    return open_function(f"reward of task {name!r}", url, policy, options, table.fallback)


class RemoteReward(LivingWorkers):
    """`protocols.RewardHandle` over reward workers: the least busy one; scoring is repeated when its worker dies."""

    def __init__(self, workers: Sequence[WorkerHandle]) -> None:
        super().__init__(workers)
        self._told: dict[str, dict[str, Usage]] = {}

    async def score(self, request: RewardRequest) -> float:
        """As `RewardWorker.score`; waits while there is no worker."""
        return cast(float, await self._repeated("score", request, float))

    async def score_group(self, requests: Sequence[RewardRequest]) -> list[float]:
        """As `RewardWorker.score_group`; waits while there is no worker."""
        return cast("list[float]", await self._repeated("score_group", list(requests), list[float]))

    async def usage(self) -> dict[str, Usage]:
        """Per task, what all calls took and cost; of a worker that is gone, what it had told last."""
        for worker in list(self._workers):
            with contextlib.suppress(WorkerError, TimeoutError):
                async with asyncio.timeout(TELL_TIMEOUT_S):  # whoever asks shows it, and does other things too
                    self._told[worker.name] = await worker.call("usage", returns=dict[str, Usage])
        for name in self._told.keys() - {worker.name for worker in self._workers}:
            for usage in self._told[name].values():
                usage.processes = 0
        names = {name for parts in self._told.values() for name in parts}
        return {name: merged(parts[name] for parts in self._told.values() if name in parts) for name in sorted(names)}

    async def _repeated(self, method: str, argument: Any, returns: Any) -> Any:
        while True:
            worker = await self._least_loaded()
            self._load[worker.name] += 1
            try:
                return await worker.call(method, argument, returns=returns)
            except WorkerDied:
                self.lost(worker.name)
            except WorkerError as error:
                raise RewardError(f"{method} on worker {worker.name}: {error}") from error
            finally:
                self._load[worker.name] -= 1
