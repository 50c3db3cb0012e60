"""One rank of a trainer that is several processes: what `data/training.py` calls on each of them.

Invariant: a call goes to all ranks and ends on all of them, with the first rank's answer; what is bulky reaches the
first rank alone, which passes it on. What this file leaves out: the calling side, and the trainers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from rollart.data.trainers.ranks import Listening, Ranks, Rendezvous, collective
from rollart.data.training import Sequences
from rollart.protocols import Trainer, WeightStore
from rollart.types import ParameterInfo, TrainBatch, TrainReport, WeightManifest

T = TypeVar("T")


class TrainRank:
    """Has the methods of `TrainWorker`, and `listen` and `join`, which come first.

    `build`: the trainer on its place among the ranks. `store`: where the first rank publishes. `device`: what torch
    calls it. `timeout_s`: how long a rank waits for others.
    """

    def __init__(self, build: Callable[[Ranks], Trainer], store: WeightStore, device: str, timeout_s: float) -> None:
        self._build, self._store, self._device, self._timeout_s = build, store, device, timeout_s
        self._listening: Listening | None = None
        self._trainer: Trainer
        self._ranks: Ranks
        self._warmed_up = (0, 0.0)

    def listen(self, host: str, num_ranks: int) -> tuple[str, int]:
        """Become the first rank, reached at `host`; host and port of the meeting place."""
        self._listening = Listening(host, num_ranks, self._timeout_s)
        return self._listening.place

    def join(self, rank: int, size: int, place: tuple[str, int], host: str) -> None:
        """Meet the others, then build the trainer. `host`: an address of this node. Raises RankError, ConfigError."""
        meeting = Rendezvous(*place)
        self._ranks = Ranks(rank, size, self._device, meeting, host, self._timeout_s, self._listening)
        with self._together("building the trainer"):
            self._trainer = self._build(self._ranks)

    def train_step(self, batch: TrainBatch | None) -> TrainReport:
        """See `Trainer.train_step`; the batch is the first rank's."""
        with self._together("train step"):
            return self._trainer.train_step(self._shared(batch, TrainBatch))

    def publish(self, version: int) -> WeightManifest | None:
        """The first rank writes the weights, which all gather, to the store as `version`. Raises WeightsError."""
        with self._together(f"publishing version {version}"):
            tensors = iter(self._trainer.tensors())
            try:
                return self._store.publish(version, tensors) if self._ranks.is_first else None
            finally:
                deque(tensors, maxlen=0)  # who does not write, or no longer, still gathers along

    def warmup(
        self, sequences: Sequences | None, steps: int, learning_rate: float, batch_tokens: int
    ) -> tuple[float, float]:
        """See `Trainer.warmup`; the sequences are the first rank's."""
        with self._together("warm-up"):
            rows = self._shared(sequences, Sequences)
            return self._trainer.warmup(rows, steps, learning_rate, batch_tokens, self._heard)

    async def warmup_progress(self) -> tuple[int, float]:
        """Steps done and last loss of the warm-up; answers while it runs."""
        return self._warmed_up

    def logprobs(self, tokens: list[int]) -> list[float]:
        """See `Trainer.logprobs`."""
        with self._together("log-probabilities"):
            return self._trainer.logprobs(tokens)

    def parameters(self) -> list[ParameterInfo]:
        """See `Trainer.parameters`."""
        return self._trainer.parameters()

    def save(self, folder: str) -> None:
        """See `Trainer.save`."""
        with self._together("saving"):
            self._trainer.save(folder)

    def load(self, folder: str) -> None:
        """See `Trainer.load`."""
        with self._together("loading"):
            self._trainer.load(folder)

    async def shutdown(self) -> None:
        """Leave the group."""
        if hasattr(self, "_ranks"):
            self._ranks.close()

    # ------------------------------------------------------------------------------------------------------ inside
    def _together(self, what: str) -> Any:
        return collective(f"{what} on rank {self._ranks.rank} of {self._ranks.size}")

    def _shared(self, value: T | None, kind: Any) -> T:
        """What the first rank was given."""
        data = msgspec.msgpack.encode(value) if self._ranks.is_first else b""
        shared: T = msgspec.msgpack.decode(self._ranks.share(data), type=kind)
        return shared

    def _heard(self, step: int, loss: float) -> None:
        self._warmed_up = (step, loss)
