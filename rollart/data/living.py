"""Equal workers of one role, of which some die and others join: who is there, and who has least to do.

Invariant: a worker that is known to be dead is not chosen. What this file leaves out: what is asked of them
(`environment.py`, `reward.py`).
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence

from rollart.protocols import WorkerHandle


class LivingWorkers:
    """Base of the handles over several workers. `_load` counts what each has in hand, by name."""

    def __init__(self, workers: Sequence[WorkerHandle]) -> None:
        self._workers = list(workers)
        self._joined = asyncio.Event()
        self._load: Counter[str] = Counter()

    def lost(self, name: str) -> None:
        """A worker is dead: what it held is gone. Harmless when that is known."""
        self._workers = [other for other in self._workers if other.name != name]

    def join(self, worker: WorkerHandle) -> None:
        """A new worker takes its share from now on."""
        self._workers.append(worker)
        self._joined.set()
        self._joined.clear()

    async def _least_loaded(self) -> WorkerHandle:
        while not self._workers:  # the caller's timeout ends the wait
            await self._joined.wait()
        return min(self._workers, key=lambda candidate: self._load[candidate.name])
