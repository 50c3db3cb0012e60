"""Work that nobody waits for: closing environments, freeing KV, aborting requests.

Invariant: a task that is started here is kept until it ends, and `drain` ends them all. A fault of such a task concerns
nobody's result: it is counted. What it leaves out: work whose result matters.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Coroutine
from typing import Any


class Background:
    """A set of tasks of the running loop. `faults` counts their errors by text."""

    def __init__(self) -> None:
        self.faults: Counter[str] = Counter()
        self._tasks: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._tasks)

    def spawn(self, work: Coroutine[Any, Any, Any], what: str) -> None:
        """Start `work` and forget it."""
        task = asyncio.get_running_loop().create_task(self._run(work, what))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def drain(self, timeout_s: float) -> None:
        """Wait until all is done; cancel what is not after `timeout_s`."""
        if not self._tasks:
            return
        _, late = await asyncio.wait(set(self._tasks), timeout=timeout_s)
        for task in late:
            task.cancel()
            self.faults["not finished in time"] += 1
        if late:
            await asyncio.wait(late)

    async def _run(self, work: Coroutine[Any, Any, Any], what: str) -> None:
        try:
            await work
        except Exception as error:
            self.faults[f"{what}: {type(error).__name__}: {error}"] += 1
