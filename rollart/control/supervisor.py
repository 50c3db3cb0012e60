"""Watches over a run: the first fault that no trajectory can carry ends it.

A worker that dies is given to `recover`, which replaces it, does without it, or raises what ends the run.
Invariant: when `guard` returns or raises, the work and all watchers have ended. What it leaves out: how to recover.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, TypeVar

from rollart.errors import WorkerDied
from rollart.protocols import WorkerHandle

T = TypeVar("T")
Recovery = Callable[[WorkerHandle, str], Awaitable[WorkerHandle | None]]


class Supervisor:
    """Turns the death of a worker into WorkerDied; other parts report what must end the run with `fail`.

    recover: given a dead worker and the reason; the worker in its place, or None where the run does without.
    """

    def __init__(self, workers: Sequence[WorkerHandle] = (), recover: Recovery | None = None) -> None:
        self._workers = workers
        self._recover = recover
        self._watchers: set[asyncio.Future[None]] = set()
        self._failed = asyncio.Event()
        self.error: BaseException | None = None

    def fail(self, error: BaseException) -> None:
        """End the run with `error`; the first one counts."""
        if self.error is None:
            self.error = error
            self._failed.set()

    async def guard(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work`; raise the first failure, after `work` was cancelled and has cleaned up."""
        main = asyncio.ensure_future(work)
        failed = asyncio.ensure_future(self._failed.wait())
        for worker in self._workers:
            self._begin_to_watch(worker)
        try:
            await asyncio.wait({main, failed}, return_when=asyncio.FIRST_COMPLETED)
            finished = main.done() and not main.cancelled() and main.exception() is None
            if self.error is not None and not finished:
                raise self.error
            return main.result()
        finally:
            await _end([main, failed])
            await _end(list(self._watchers))

    def watch(self, worker: WorkerHandle) -> None:
        """A worker that was not there when `guard` began."""
        self._begin_to_watch(worker)

    def _begin_to_watch(self, worker: WorkerHandle) -> None:
        watcher = asyncio.ensure_future(self._watch(worker))
        self._watchers.add(watcher)
        watcher.add_done_callback(self._watchers.discard)

    async def _watch(self, worker: WorkerHandle) -> None:
        reason = await worker.wait_dead()
        try:
            if self._recover is None:
                raise WorkerDied(f"worker {worker.name!r} died: {reason}")
            successor = await self._recover(worker, reason)
        except Exception as error:
            self.fail(error)
        else:
            if successor is not None:
                self._begin_to_watch(successor)


async def _end(tasks: Sequence[asyncio.Future[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
