"""SimulatedTrainer: a train_step that lasts as long as its tokens cost on the devices of the trainer.

Invariant: it does one thing at a time, as a worker's thread does, so that a publication never overlaps a train_step.
What this file leaves out: the weights and the loss. Checkpoints cost nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from rollart.data.simulated.device import Pace
from rollart.data.simulated.store import SimulatedStore
from rollart.data.simulated.timeline import Timeline
from rollart.errors import TrainError
from rollart.types import ParameterInfo, TrainBatch, TrainReport, WeightManifest

TrainSeconds = Callable[[Sequence[int], int, int], float]
"""(tokens of each sequence, generated tokens of all, devices that train together) -> seconds of a train_step."""


def modelled(pace: Pace) -> TrainSeconds:
    """By the device model: `Pace.train_seconds`."""
    return lambda lengths, _, num_devices: pace.train_seconds(lengths, num_devices)


def measured(seconds_per_token: float) -> TrainSeconds:
    """As a run has measured it, per generated token."""
    return lambda _, generated_tokens, __: generated_tokens * seconds_per_token


class SimulatedTrainer:
    """Has the methods of `data.training.TrainWorker`.

    `seconds`: of a train_step; `num_devices`: how many devices train together, asked at each step. `timeline` gets a
    track `name`.
    """

    def __init__(
        self,
        seconds: TrainSeconds,
        num_devices: Callable[[], int],
        store: SimulatedStore,
        timeline: Timeline | None = None,
        name: str = "trainer",
    ) -> None:
        self._seconds, self._num_devices, self._store = seconds, num_devices, store
        self._timeline, self._name = timeline, name
        self._turn = asyncio.Lock()

    async def train_step(self, batch: TrainBatch) -> TrainReport:
        """One step on all tokens of a batch. Raises TrainError when nothing in it was generated."""
        trajectories = [each for group in batch.groups for each in group.trajectories]
        trained_tokens = sum(each.num_generated_tokens for each in trajectories)
        if not trained_tokens:
            raise TrainError(f"step {batch.step}: no trajectory of the batch has a generated token")
        seconds = self._seconds([each.num_tokens for each in trajectories], trained_tokens, self._num_devices())
        async with self._turn:
            await self._spend("train", seconds)
        return TrainReport(
            step=batch.step,
            loss=0.0,
            grad_norm=0.0,
            learning_rate=0.0,
            trained_tokens=trained_tokens,
            seconds=seconds,
            metrics={"samples": float(len(trajectories))},
        )

    async def _spend(self, what: str, seconds: float) -> None:
        began_s = asyncio.get_running_loop().time()
        await asyncio.sleep(seconds)
        if self._timeline is not None:
            self._timeline.span(self._name, what, began_s, began_s + seconds)

    async def publish(self, version: int) -> WeightManifest:
        """Push the weights to the store as `version`. Raises WeightsError."""
        async with self._turn:
            loop = asyncio.get_running_loop()
            began_s = loop.time()
            manifest = await self._store.publish(version)
        if self._timeline is not None:
            self._timeline.span(self._name, "publish", began_s, loop.time())
        return manifest

    async def logprobs(self, tokens: list[int]) -> list[float]:
        """Zeros, as simulated engines answer."""
        return [0.0] * (len(tokens) - 1)

    async def parameters(self) -> list[ParameterInfo]:
        """None, as simulated engines hold."""
        return []

    async def save(self, folder: str) -> None:
        """Nothing is there to save."""

    async def load(self, folder: str) -> None:
        """Nothing was saved."""
