"""Watches over a run: the first fault that no trajectory can carry ends it.

Invariant: when `guard` returns or raises, the work and all watchers have ended. What it leaves out: recovery.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

from rollart.errors import WorkerDied
from rollart.protocols import WorkerHandle

T = TypeVar("T")


class Supervisor:
    """Turns the death of a worker into WorkerDied; other parts report what must end the run with `fail`."""

    def __init__(self, workers: Sequence[WorkerHandle] = ()) -> None:
        self._workers = workers
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
        watchers = [asyncio.ensure_future(self._watch(worker)) for worker in self._workers]
        try:
            await asyncio.wait({main, failed}, return_when=asyncio.FIRST_COMPLETED)
            finished = main.done() and not main.cancelled() and main.exception() is None
            if self.error is not None and not finished:
                raise self.error
            return main.result()
        finally:
            await _end([main, failed, *watchers])

    async def _watch(self, worker: WorkerHandle) -> None:
        reason = await worker.wait_dead()
        self.fail(WorkerDied(f"worker {worker.name!r} died: {reason}"))


async def _end(tasks: Sequence[asyncio.Future[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
