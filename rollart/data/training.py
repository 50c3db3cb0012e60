"""The trainer's worker: what lives in the process, and the handle through which control reaches it.

Invariants: weights go from the trainer to the store without passing control, which says only their version; weights
that the trainer no longer has are not published under the version that they had; every iteration over the trainer's
tensors is gone through to its end, as several ranks may have to; importing this file imports no torch, so that a driver
can hold a `RemoteTrainer`.
What this file leaves out: the optimizer (`data/trainers`), the store (`data/weights.py`), the process (`data/worker`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import cast

from rollart.errors import WeightsError, WeightsLost
from rollart.protocols import Tensors, Trainer, WeightStore, WorkerHandle
from rollart.types import ParameterInfo, TrainBatch, TrainReport, WeightManifest

Sequences = list[tuple[list[int], list[float]]]
"""Warm-up data: (token ids, one weight per token)."""


class TrainWorker:
    """One trainer and the store it publishes to. Its methods block; the worker runs them in one thread, in turn."""

    def __init__(self, trainer: Trainer, store: WeightStore) -> None:
        self._trainer = trainer
        self._store = store
        self._version: int | None = None
        """Of the current weights; None before they are asked to be published."""
        self._warmed_up = (0, 0.0)

    def train_step(self, batch: TrainBatch) -> TrainReport:
        """See `Trainer.train_step`."""
        self._version = None
        return self._trainer.train_step(batch)

    def publish(self, version: int) -> WeightManifest:
        """Write the current weights to the store as `version`. Raises WeightsError; WeightsLost: see `rescue`."""
        self._version = version
        return self._with_all(lambda tensors: self._store.publish(version, tensors))

    def rescue(self, version: int) -> WeightManifest:
        """Publish a version elsewhere that could not be published, or was lost.

        Raises WeightsError, also when the trainer has other weights by now.
        """
        if self._version != version:
            raise WeightsError(f"version {version} is lost, and the trainer holds other weights by now")
        return self._with_all(lambda tensors: self._store.rescue(version, tensors))

    def _with_all(self, publish: Callable[[Tensors], WeightManifest]) -> WeightManifest:
        tensors = iter(self._trainer.tensors())
        try:
            return publish(tensors)
        finally:
            deque(tensors, maxlen=0)

    def warmup(self, sequences: Sequences, steps: int, learning_rate: float, batch_tokens: int) -> tuple[float, float]:
        """See `Trainer.warmup`."""
        self._version = None
        return self._trainer.warmup(sequences, steps, learning_rate, batch_tokens, self._heard)

    async def warmup_progress(self) -> tuple[int, float]:
        """Steps done and last loss of the warm-up; answers while it runs."""
        return self._warmed_up

    def _heard(self, step: int, loss: float) -> None:
        self._warmed_up = (step, loss)

    def logprobs(self, tokens: list[int]) -> list[float]:
        """See `Trainer.logprobs`."""
        return self._trainer.logprobs(tokens)

    def parameters(self) -> list[ParameterInfo]:
        """See `Trainer.parameters`."""
        return self._trainer.parameters()

    def save(self, folder: str) -> None:
        """See `Trainer.save`."""
        self._trainer.save(folder)

    def load(self, folder: str) -> None:
        """See `Trainer.load`."""
        self._version = None
        self._trainer.load(folder)


class RemoteTrainer:
    """Implements `protocols.TrainHandle` over a worker that holds a `TrainWorker`.

    `say` hears, in one line, when a publication did not go as usual.
    """

    def __init__(self, worker: WorkerHandle, *, say: Callable[[str], None] | None = None) -> None:
        self._worker = worker
        self._say = say

    async def train_step(self, batch: TrainBatch) -> TrainReport:
        """One optimizer step. Raises TrainError, RewardError, WorkerDied."""
        return cast(TrainReport, await self._worker.call("train_step", batch, returns=TrainReport))

    async def publish(self, version: int) -> WeightManifest:
        """Publish the current weights, where they can be; returns when the manifest is written.

        Raises WeightsError, WorkerDied.
        """
        try:
            return await self._manifest("publish", version)
        except WeightsLost:
            return await self._manifest("rescue", version)

    async def rescue(self, version: int) -> None:
        """Publish a version that was lost once more, elsewhere. Raises WeightsError, WorkerDied."""
        await self._manifest("rescue", version)

    async def _manifest(self, method: str, version: int) -> WeightManifest:
        manifest = cast(WeightManifest, await self._worker.call(method, version, returns=WeightManifest))
        if manifest.note and self._say is not None:
            self._say(f"weights: {manifest.note}")
        return manifest

    async def warmup(
        self, sequences: Sequence[tuple[list[int], list[float]]], steps: int, learning_rate: float, batch_tokens: int
    ) -> tuple[float, float]:
        """Supervised steps before step 1; the first and the last loss. Raises TrainError, WorkerDied."""
        losses = await self._worker.call(
            "warmup", list(sequences), steps, learning_rate, batch_tokens, returns=tuple[float, float]
        )
        return cast(tuple[float, float], losses)

    async def warmup_progress(self) -> tuple[int, float]:
        """Steps done and last loss of the warm-up. Raises WorkerDied."""
        return cast(tuple[int, float], await self._worker.call("warmup_progress", returns=tuple[int, float]))

    async def logprobs(self, tokens: list[int]) -> list[float]:
        """Log-probabilities under the trainer's weights at temperature 1; length len(tokens) - 1."""
        return cast(list[float], await self._worker.call("logprobs", tokens, returns=list[float]))

    async def parameters(self) -> list[ParameterInfo]:
        """Names, shapes and dtypes of what is published."""
        return cast(list[ParameterInfo], await self._worker.call("parameters", returns=list[ParameterInfo]))

    async def save(self, folder: str) -> None:
        """Write a checkpoint. Raises RunFolderError, WorkerDied."""
        await self._worker.call("save", folder, returns=None)

    async def load(self, folder: str) -> None:
        """Go on from a checkpoint. Raises RunFolderError, WorkerDied."""
        await self._worker.call("load", folder, returns=None)
