"""Environment workers: many environments in one process, each on its own thread, none in the way of another.

Invariant: whatever an environment does (hang, raise, exit, return nonsense) costs its own call. A hung thread is
abandoned with its environment, and another call takes its place at once; an environment that failed is never used
again. Environments that ended cleanly serve further episodes of their task.
What this file leaves out: retries (`control/env_manager.py`), and an environment that blocks the whole interpreter
from C code, which only the end of its process cures.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, cast

import msgspec
from msgspec.structs import replace

from rollart.data.arrivals import Arrivals
from rollart.data.living import LivingWorkers
from rollart.errors import EnvError, EnvTimeout, WorkerDied, WorkerError
from rollart.protocols import Env, WorkerHandle
from rollart.sections import TaskConfig
from rollart.tasks.hosted import HostedEnv
from rollart.tasks.registry import factory
from rollart.types import EnvironmentCost, EnvReply

log = logging.getLogger(__name__)

CLOSE_S = 3.0
"""Environments that end with the run get this long; less than a runtime waits for the worker itself."""


class EnvironmentWorker:
    """Lives in a worker process. `tasks`: TaskConfig by name, as plain data; `num_threads`: calls that run at once.

    Raises ConfigError when a task cannot be built from its config.
    """

    def __init__(self, tasks: Mapping[str, Mapping[str, Any]], num_threads: int) -> None:
        self._configs = {name: msgspec.convert(task, TaskConfig) for name, task in tasks.items()}
        self._factories: dict[str, Callable[[], Env]] = {
            name: factory(config, name) for name, config in self._configs.items()
        }
        self._permits = asyncio.Semaphore(num_threads)
        self._running: dict[str, HostedEnv] = {}
        self._idle: dict[str, list[HostedEnv]] = defaultdict(list)
        self._closing: set[asyncio.Future[None]] = set()
        self._arrivals = Arrivals()
        self._num_hung = 0
        self._cost = EnvironmentCost()

    async def reset(self, env_id: str, task: str, seed: int) -> EnvReply:
        """Begin an episode, in place of any other under this id. Raises EnvTimeout or EnvError."""
        if task not in self._configs:
            raise EnvError(f"no task {task!r} here; this worker has {', '.join(self._configs)}")
        await self.close(env_id)
        idle = self._idle[task]
        hosted = idle.pop() if idle else HostedEnv(task, self._factories[task])
        self._running[env_id] = hosted
        timeout_s = self._configs[task].reset_timeout_s
        before_s, self._cost.resets = hosted.cpu_s, self._cost.resets + 1
        try:
            return await self._call(env_id, hosted, f"reset of task {task!r}", timeout_s, lambda: hosted.reset(seed))
        finally:
            self._cost.reset_cpu_s += hosted.cpu_s - before_s

    async def step(self, env_id: str, action: str) -> EnvReply:
        """Apply an action; what ends the episode also closes it. Raises EnvTimeout or EnvError."""
        hosted = self._running.get(env_id)
        if hosted is None:
            raise EnvError(f"no environment {env_id!r} here: it was never reset, failed, or is closed")
        timeout_s = self._configs[hosted.task].step_timeout_s
        what, before_s, self._cost.steps = f"step of task {hosted.task!r}", hosted.cpu_s, self._cost.steps + 1
        try:
            reply = await self._call(env_id, hosted, what, timeout_s, lambda: hosted.step(action))
        finally:
            self._cost.step_cpu_s += hosted.cpu_s - before_s
        if reply.terminated or reply.truncated:
            await self.close(env_id)
        return reply

    async def close(self, env_id: str) -> None:
        """End an episode at any point. Never raises; unknown ids are nothing to do."""
        hosted = self._running.pop(env_id, None)
        if hosted is None:
            return
        if hosted.is_busy:
            self._retire(hosted)
        else:
            self._idle[hosted.task].append(hosted)  # as many as were once in use together, as more are never made

    async def give_up(self, env_ids: list[str]) -> None:
        """Close episodes whose owner is dead; unknown ids are nothing to do."""
        for env_id in env_ids:
            await self.close(env_id)

    async def shutdown(self) -> None:
        """Close all environments; one that does not close in time is left to the end of the process."""
        for hosted in (*self._running.values(), *(each for idle in self._idle.values() for each in idle)):
            self._retire(hosted)
        self._running, self._idle = {}, defaultdict(list)
        if self._closing:
            await asyncio.wait(self._closing, timeout=CLOSE_S)

    async def stats(self) -> dict[str, int]:
        """Environments in use, kept for reuse, and abandoned because they hung."""
        idle = sum(map(len, self._idle.values()))
        return {"running": len(self._running), "idle": idle, "hung": self._num_hung}

    async def cost(self) -> EnvironmentCost:
        """What resets and steps have cost so far, and this process in all."""
        return replace(self._cost, process_cpu_s=time.process_time())

    async def _call(
        self, env_id: str, hosted: HostedEnv, what: str, timeout_s: float, submit: Callable[[], Future[EnvReply]]
    ) -> EnvReply:
        async with self._permits:
            if self._running.get(env_id) is not hosted:  # closed while this call waited; others may use it by now
                raise EnvError(f"{what}: its episode was closed before the call began")
            try:
                async with asyncio.timeout(timeout_s):
                    return await self._arrivals.wait(submit())
            except EnvError:
                self._forget(env_id, hosted)
                self._retire(hosted)
                raise
            except TimeoutError:
                self._num_hung += 1
                log.warning("%s did not answer within %g s; its thread is abandoned", what, timeout_s)
                self._forget(env_id, hosted)
                hosted.retire()  # and nobody waits for it
                raise EnvTimeout(f"{what} did not answer within {timeout_s:g} s") from None

    def _forget(self, env_id: str, hosted: HostedEnv) -> None:
        if self._running.get(env_id) is hosted:
            del self._running[env_id]

    def _retire(self, hosted: HostedEnv) -> None:
        closing = asyncio.ensure_future(asyncio.wrap_future(hosted.retire()))
        self._closing.add(closing)
        closing.add_done_callback(self._closed)

    def _closed(self, closing: asyncio.Future[None]) -> None:
        self._closing.discard(closing)
        if not closing.cancelled() and (error := closing.exception()) is not None:
            log.warning("%s", error)


class RemoteEnvironment(LivingWorkers):
    """`protocols.EnvHandle` over environment workers: an id stays with the worker that reset it.

    While there is no worker, `reset` waits for one to join.
    """

    def __init__(self, workers: Sequence[WorkerHandle]) -> None:
        super().__init__(workers)
        self._worker_of: dict[str, WorkerHandle] = {}

    async def reset(self, env_id: str, task: str, seed: int) -> EnvReply:
        """As `EnvironmentWorker.reset`, on the least loaded worker unless the id has one."""
        worker = self._worker_of.get(env_id) or await self._assign(env_id)
        return await self._call(env_id, worker, "reset", env_id, task, seed)

    async def step(self, env_id: str, action: str) -> EnvReply:
        """As `EnvironmentWorker.step`."""
        worker = self._worker_of.get(env_id)
        if worker is None:
            raise EnvError(f"no environment {env_id!r}: it was never reset, or its worker died")
        reply = await self._call(env_id, worker, "step", env_id, action)
        if reply.terminated or reply.truncated:  # the worker has closed it
            self._release(env_id)
        return reply

    async def close(self, env_id: str) -> None:
        """Never raises."""
        worker = self._release(env_id)
        if worker is None:
            return
        try:
            await worker.call("close", env_id)
        except WorkerDied:
            return  # which is said once, by whoever watches the worker
        except WorkerError as error:
            log.warning("close of %s on %s: %s", env_id, worker.name, error)

    async def give_up(self, env_ids: list[str]) -> None:
        """Close episodes that another process began, on whichever worker they are. Never raises."""
        calls = [worker.call("give_up", env_ids) for worker in self._workers]
        for answer in await asyncio.gather(*calls, return_exceptions=True):
            if isinstance(answer, Exception) and not isinstance(answer, WorkerDied):
                log.warning("giving up environments: %s", answer)

    async def _call(self, env_id: str, worker: WorkerHandle, method: str, *args: Any) -> EnvReply:
        try:
            return cast(EnvReply, await worker.call(method, *args, returns=EnvReply))
        except WorkerDied as error:
            self.lost(worker.name)
            self._release(env_id)
            raise EnvError(f"{method} on worker {worker.name}: {error}") from error
        except WorkerError as error:
            raise EnvError(f"{method} on worker {worker.name}: {error}") from error

    async def _assign(self, env_id: str) -> WorkerHandle:
        worker = await self._least_loaded()
        self._worker_of[env_id] = worker
        self._load[worker.name] += 1
        return worker

    def _release(self, env_id: str) -> WorkerHandle | None:
        worker = self._worker_of.pop(env_id, None)
        if worker is not None:
            self._load[worker.name] -= 1
        return worker
