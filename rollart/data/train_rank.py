"""One rank of a trainer that is several processes: what `data/training.py` calls on each of them.

Invariant: a call goes to all ranks and ends on all of them, with the first rank's answer; what is bulky reaches the
first rank alone, which passes it on, and it alone opens the store. What this file leaves out: the calling side, and the
trainers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from rollart.data.trainers.ranks import Listening, Ranks, Rendezvous, collective
from rollart.data.training import Sequences, TrainWorker
from rollart.protocols import Tensors, Trainer, WeightStore
from rollart.types import ParameterInfo, TrainBatch, TrainReport, WeightManifest

T = TypeVar("T")


class TrainRank:
    """Has the methods of `TrainWorker`, and `listen` and `join`, which come first.

    `build`: the trainer on its place among the ranks. `open_store`: where the first rank publishes. `device`: what
    torch calls it. `timeout_s`: how long a rank waits for others.
    """

    def __init__(
        self,
        build: Callable[[Ranks], Trainer],
        open_store: Callable[[], WeightStore],
        device: str,
        timeout_s: float,
    ) -> None:
        self._build, self._open_store, self._device, self._timeout_s = build, open_store, device, timeout_s
        self._listening: Listening | None = None
        self._worker: TrainWorker
        self._ranks: Ranks

    def listen(self, host: str, num_ranks: int) -> tuple[str, int]:
        """Become the first rank, reached at `host`; host and port of the meeting place."""
        self._listening = Listening(host, num_ranks, self._timeout_s)
        return self._listening.place

    def join(self, rank: int, size: int, place: tuple[str, int], host: str) -> None:
        """Meet the others, then build the trainer. `host`: an address of this node.

        Raises RankError, ConfigError, and what opening the store raises.
        """
        meeting = Rendezvous(*place)
        self._ranks = Ranks(rank, size, self._device, meeting, host, self._timeout_s, self._listening)
        with self._together("building the trainer"):
            trainer = self._build(self._ranks)
        self._worker = TrainWorker(trainer, self._open_store() if self._ranks.is_first else Nowhere())

    def train_step(self, batch: TrainBatch | None) -> TrainReport:
        """See `Trainer.train_step`; the batch is the first rank's."""
        with self._together("train step"):
            return self._worker.train_step(self._shared(batch, TrainBatch))

    def publish(self, version: int) -> WeightManifest:
        """The first rank writes the weights, which all gather, to the store. Raises WeightsError, WeightsLost."""
        with self._together(f"publishing version {version}"):
            return self._worker.publish(version)

    def rescue(self, version: int) -> WeightManifest:
        """As `publish`, of a version that was lost, elsewhere. Raises WeightsError on all ranks alike."""
        with self._together(f"publishing version {version} once more"):
            return self._worker.rescue(version)

    def warmup(
        self, sequences: Sequences | None, steps: int, learning_rate: float, batch_tokens: int
    ) -> tuple[float, float]:
        """See `Trainer.warmup`; the sequences are the first rank's."""
        with self._together("warm-up"):
            return self._worker.warmup(self._shared(sequences, Sequences), steps, learning_rate, batch_tokens)

    async def warmup_progress(self) -> tuple[int, float]:
        """Steps done and last loss of the warm-up; answers while it runs."""
        return await self._worker.warmup_progress()

    def logprobs(self, tokens: list[int]) -> list[float]:
        """See `Trainer.logprobs`."""
        with self._together("log-probabilities"):
            return self._worker.logprobs(tokens)

    def parameters(self) -> list[ParameterInfo]:
        """See `Trainer.parameters`."""
        return self._worker.parameters()

    def save(self, folder: str) -> None:
        """See `Trainer.save`."""
        with self._together("saving"):
            self._worker.save(folder)

    def load(self, folder: str) -> None:
        """See `Trainer.load`."""
        with self._together("loading"):
            self._worker.load(folder)

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


class Nowhere:
    """Implements `Shelving` on ranks that do not write: they gather along, which `TrainWorker` sees to."""

    def publish(self, version: int, tensors: Tensors) -> WeightManifest:  # noqa: ARG002
        """Nothing is written."""
        return WeightManifest(version, (), ())

    rescue = publish
