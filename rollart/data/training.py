"""The trainer's worker: what lives in the process, and the handle through which control reaches it, or all its ranks.

Invariants: weights go from the trainer to the store without passing control, which says only their version; weights
that the trainer no longer has are not published under the version that they had; every iteration over the trainer's
tensors is gone through to its end, as several ranks may have to; importing this file imports no torch, so that a driver
can hold a `RemoteTrainer`.
What this file leaves out: the optimizer (`data/trainers`), the store (`data/weights.py`), the process (`data/worker`),
and what is said to a rank alone (`data/train_rank.py`).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any, Protocol, cast

from rollart.errors import RankError, WeightsError, WeightsLost, WorkerDied
from rollart.protocols import Tensors, Trainer, WorkerHandle
from rollart.types import ParameterInfo, TrainBatch, TrainReport, WeightManifest

Sequences = list[tuple[list[int], list[float]]]
"""Warm-up data: (token ids, one weight per token)."""
LAST_WORDS_S = 10.0
"""How long ranks may take to fail after the first of them did, or to be found dead."""


class Shelving(Protocol):
    """The writing side of `protocols.WeightStore`."""

    def publish(self, version: int, tensors: Tensors) -> WeightManifest: ...

    def rescue(self, version: int, tensors: Tensors) -> WeightManifest: ...


class TrainWorker:
    """One trainer and the store it publishes to. Its methods block; the worker runs them in one thread, in turn."""

    def __init__(self, trainer: Trainer, store: Shelving) -> None:
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
    """Implements `protocols.TrainHandle` over the workers of the trainer: one `TrainWorker`, or `TrainRank`s in order.

    Ranks are called one call at a time, as the calls of a group must come to all of its members in one order. `say`
    hears, in one line, when a publication did not go as usual.
    """

    def __init__(self, *workers: WorkerHandle, say: Callable[[str], None] | None = None) -> None:
        self._first, self._others = workers[0], workers[1:]
        self._say = say
        self._turn = asyncio.Lock()

    async def train_step(self, batch: TrainBatch) -> TrainReport:
        """One optimizer step. Raises TrainError, RewardError, WorkerDied."""
        return cast(TrainReport, await self._all("train_step", batch, others=(None,), returns=TrainReport))

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
        manifest = cast(WeightManifest, await self._all(method, version, returns=WeightManifest))
        if manifest.note and self._say is not None:
            self._say(f"weights: {manifest.note}")
        return manifest

    async def warmup(
        self, sequences: Sequence[tuple[list[int], list[float]]], steps: int, learning_rate: float, batch_tokens: int
    ) -> tuple[float, float]:
        """Supervised steps before step 1; the first and the last loss. Raises TrainError, WorkerDied."""
        how = (steps, learning_rate, batch_tokens)
        losses = await self._all("warmup", list(sequences), *how, others=(None, *how), returns=tuple[float, float])
        return cast(tuple[float, float], losses)

    async def warmup_progress(self) -> tuple[int, float]:
        """Steps done and last loss of the warm-up. Raises WorkerDied."""
        return cast(tuple[int, float], await self._first.call("warmup_progress", returns=tuple[int, float]))

    async def logprobs(self, tokens: list[int]) -> list[float]:
        """Log-probabilities under the trainer's weights at temperature 1; length len(tokens) - 1."""
        return cast(list[float], await self._all("logprobs", tokens, returns=list[float]))

    async def parameters(self) -> list[ParameterInfo]:
        """Names, shapes and dtypes of what is published."""
        return cast(list[ParameterInfo], await self._all("parameters", returns=list[ParameterInfo]))

    async def save(self, folder: str) -> None:
        """Write a checkpoint. Raises RunFolderError, WorkerDied."""
        await self._all("save", folder, returns=None)

    async def load(self, folder: str) -> None:
        """Go on from a checkpoint. Raises RunFolderError, WorkerDied."""
        await self._all("load", folder, returns=None)

    async def _all(self, method: str, *args: Any, returns: Any, others: tuple[Any, ...] | None = None) -> Any:
        """The first rank's answer. `others`: the arguments of the other ranks, where not the same."""
        if not self._others:
            return await self._first.call(method, *args, returns=returns)
        theirs = args if others is None else others
        async with self._turn:
            rest = [worker.call(method, *theirs, returns=Any) for worker in self._others]
            answers = await together([self._first.call(method, *args, returns=returns), *rest])
        return answers[0]


async def form_group(workers: Sequence[WorkerHandle], hosts: Sequence[str]) -> None:
    """Let `TrainRank`s meet and build their trainers. `hosts`: of each, an address of its node.

    Raises what a construction raised, RankError, WorkerDied.
    """
    place = await workers[0].call("listen", hosts[0], len(workers), returns=tuple[str, int])
    each = enumerate(zip(workers, hosts, strict=True))
    await together(
        [worker.call("join", rank, len(workers), place, host, returns=None) for rank, (worker, host) in each]
    )


async def together(calls: Iterable[Awaitable[Any]]) -> list[Any]:
    """What each rank answers. Where one fails, the others are heard for a while, and the likeliest cause is raised."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        _, pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        if pending:
            await asyncio.wait(pending, timeout=LAST_WORDS_S)
    finally:
        for task in tasks:
            task.cancel()
        answers = await asyncio.gather(*tasks, return_exceptions=True)
    errors = [error for error in answers if isinstance(error, Exception)]
    if errors:
        raise min(errors, key=lambda error: (not isinstance(error, WorkerDied), isinstance(error, RankError)))
    return answers
