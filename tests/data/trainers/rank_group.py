"""Processes that are ranks of one trainer after another, so that tests pay for their start once."""

from __future__ import annotations

import asyncio
import itertools
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from rollart.data import roles
from rollart.data.runtime import LocalRuntime, ProcessWorker
from rollart.data.train_rank import TrainRank
from rollart.data.training import RemoteTrainer, form_group
from rollart.data.weights import FileWeightStore

TARGET = f"{__name__}:RankHost"
LOOPBACK = "127.0.0.1"


class RankHost:
    """Lives in a process; has the methods of the rank that `prepare` made last."""

    def __init__(self) -> None:
        self.rank: TrainRank | None = None

    async def prepare(self, trainer: str, folder: str, options: dict[str, Any], weights: str) -> None:
        """Leave the group of before, if any, and be a rank of another."""
        if self.rank is not None:
            await self.rank.shutdown()
        store = {"folder": weights, "bucket_bytes": 4096, "keep": 100}
        made = roles.training(folder, trainer, options, "cpu", 1.0, 0, store)
        assert isinstance(made, TrainRank)
        self.rank = made

    def most_held(self, weights: str, bucket_bytes: int) -> int:
        """Publish into a folder of its own; the most bytes of gathered tensors that lived at once on this rank."""
        assert self.rank is not None
        watch = Watch()
        tensors = watch.seen(self.rank._worker._trainer.tensors())
        FileWeightStore(weights, bucket_bytes, 2).publish(0, tensors)
        return watch.most_bytes

    def __getattr__(self, name: str) -> Any:
        return getattr(self.rank, name)


class Watch:
    """Counts what is alive of the tensors that pass."""

    def __init__(self) -> None:
        self.most_bytes = 0
        self._passed: list[tuple[weakref.ref[Tensor], int]] = []

    def seen(self, tensors: Any) -> Iterator[tuple[str, Tensor]]:
        """The same tensors; none of them is held here."""
        pairs = iter(tensors)
        for name, tensor in pairs:
            self._passed.append((weakref.ref(tensor), tensor.nbytes))
            alive = sum(num_bytes for reference, num_bytes in self._passed if reference() is not None)
            self.most_bytes = max(self.most_bytes, alive)
            yield name, tensor
            del tensor


class RankGroup:
    """Some processes, and the loop that talks to them. `weights`: where trainers publish; `target`: what they host."""

    def __init__(self, folder: Path, target: str = TARGET) -> None:
        self._target = target
        self.weights = folder / "weights"
        self._runner = asyncio.Runner()
        self._runtime = LocalRuntime(folder / "logs")
        self.workers: list[ProcessWorker] = []
        self._versions = itertools.count(1)

    def run(self, work: Any) -> Any:
        """What a coroutine returns."""
        return self._runner.run(work)

    def trainer(self, num_ranks: int, folder: object, name: str = "fsdp2", **options: Any) -> Trained:
        """A new trainer on the first ranks."""
        self.run(self._grow(num_ranks))
        ranks = self.workers[:num_ranks]
        self.run(self._form(ranks, name, str(folder), options))
        return Trained(self, ranks)

    async def _grow(self, number: int) -> None:
        self.workers = [worker for worker in self.workers if worker.process.returncode is None]
        missing = range(len(self.workers), number)
        spawned = [self._runtime.spawn(f"rank-{next(self._versions)}", self._target, {}) for _ in missing]
        self.workers += await asyncio.gather(*spawned)  # type: ignore[arg-type]

    async def _form(self, ranks: Sequence[ProcessWorker], name: str, folder: str, options: dict[str, Any]) -> None:
        for rank in ranks:
            await rank.call("prepare", name, folder, options, str(self.weights))
        await form_group(ranks, [LOOPBACK] * len(ranks))

    def close(self) -> None:
        """End the processes."""
        self.run(self._runtime.shutdown())
        self._runner.close()

    def fetch(self, trainer: RemoteTrainer) -> dict[str, Any]:
        """What a trainer publishes."""
        version = next(self._versions)
        self.run(trainer.publish(version))
        return dict(FileWeightStore(self.weights, 4096, 100).fetch(version))


class Trained:
    """A trainer of several ranks, called as one of a single process is."""

    def __init__(self, group: RankGroup, ranks: Sequence[ProcessWorker]) -> None:
        self.group, self.ranks, self.remote = group, list(ranks), RemoteTrainer(*ranks)

    def __getattr__(self, name: str) -> Any:
        return lambda *args: self.group.run(getattr(self.remote, name)(*args))

    def weights(self) -> dict[str, Any]:
        """What it publishes."""
        return self.group.fetch(self.remote)
