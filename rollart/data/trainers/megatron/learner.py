"""What policy training steps on: a model over tensor, pipeline, context and expert parallel ranks.

Invariant: of the ranks that hold a model together, all get the same log-probabilities and losses. What this file leaves
out: Megatron itself (`stage.py`), losses and steps (`policy.py`).

Shape suffixes: B rows, T positions, C positions of this rank, N trained positions, V its share of the vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from rollart.data.trainers.fit import check_divides
from rollart.data.trainers.learner import Adam, Loss
from rollart.data.trainers.megatron import words
from rollart.data.trainers.megatron.adam import MegatronAdam
from rollart.data.trainers.megatron.context import gathered_positions, places_of
from rollart.data.trainers.megatron.holding import Holding
from rollart.data.trainers.megatron.place import Place
from rollart.data.trainers.megatron.stage import Stage
from rollart.data.trainers.megatron.vocabulary import from_split_logits
from rollart.data.trainers.ranks import Ranks
from rollart.data.trainers.scoring import empty_model, load_model
from rollart.learn.batching import MicroBatch, Sample, collate, deal
from rollart.sections import TrainConfig


class MegatronLearner:
    """Implements `Learner`. `source`: a learner whose weights it has, and keeps; default: those of `folder`, to train.

    Raises ConfigError for a model that Megatron is not known to hold, or that does not divide.
    """

    packs = False

    def __init__(
        self, folder: str, options: TrainConfig, ranks: Ranks, place: Place, source: MegatronLearner | None = None
    ) -> None:
        self._folder, self._options, self._ranks, self._place = folder, options, ranks, place
        empty = empty_model(folder)
        self.config = empty.config
        check_divides(self.config.to_dict(), place.layout)
        self._shape = shape = words.shape_of(self.config)
        settings = words.settings(self.config, shape, options, place.layout)
        head = words.head(self.config, shape, place.layout)
        recomputes, trained = options.activation_checkpointing, source is None
        self.stage = Stage(settings, head, place, ranks.device, recomputes, trained)
        self.holding = Holding(self.stage, shape, {name: each.shape for name, each in empty.named_parameters()}, ranks)
        if source is None:
            self.holding.read(dict(load_model(folder, "cpu").named_parameters()) if ranks.is_first else {})
        else:
            self._copy(source)
        self.stage.complete()

    # ------------------------------------------------------------------------------------------------------- learning
    def deal(self, batches: Sequence[list[Sample]]) -> list[list[Sample]]:
        """Every data-parallel rank's share; the ranks that hold a model together have the same."""
        return deal(batches, self._place.layout.data)[self._place.data_rank]

    def collate(self, samples: Sequence[Sample]) -> MicroBatch:
        """A micro-batch of plain rows."""
        return collate(samples, self._ranks.device)

    @torch.no_grad()
    def logprobs(self, batches: Sequence[MicroBatch], temperature: float) -> list[Tensor]:
        """logprobs_BT of each micro-batch; 0 outside the mask. The last stage tells the others."""

        def take(number: int, logits_BCV: Tensor) -> tuple[Tensor, Any]:
            logprobs_BT, _ = self._score(batches[number], logits_BCV, temperature, False)
            return logprobs_BT, logprobs_BT

        found = self.stage.run([self._own(each.tokens_BT) for each in batches], take, backward=False)
        scored = found or [torch.empty(each.mask_BT.shape, device=self._ranks.device) for each in batches]
        for logprobs_BT in scored:
            self._place.told_by_last(logprobs_BT)
        return scored

    def accumulate(self, batches: Sequence[MicroBatch], temperature: float, entropy_gradient: bool, loss: Loss) -> None:
        """Forward and backward passes of all micro-batches, as the pipeline schedules them."""

        def take(number: int, logits_BCV: Tensor) -> tuple[Tensor, Any]:
            return loss(number, *self._score(batches[number], logits_BCV, temperature, entropy_gradient)), None

        self.stage.run([self._own(each.tokens_BT) for each in batches], take, backward=True)

    def total(self, values: Mapping[str, float]) -> dict[str, float]:
        """Sums over the data-parallel ranks, each spoken for by one of those that compute the same."""
        return self._ranks.total(values, counts=self._place.speaks)

    def optimizer(self, settings: Adam) -> MegatronAdam:
        """Megatron's own, in shards."""
        return self.stage.optimizer(settings)

    def frozen(self) -> MegatronLearner:
        """Another model with the weights of this moment."""
        return MegatronLearner(self._folder, self._options, self._ranks, self._place, source=self)

    @torch.no_grad()
    def _copy(self, source: MegatronLearner) -> None:
        theirs = source.stage.weights()
        for name, weight in self.stage.weights().items():
            weight.copy_(theirs[name])

    # ------------------------------------------------------------------------------------------------------ positions
    def _own(self, each_BT: Tensor) -> Tensor:
        """This rank's positions, of rows that are filled up so that every rank gets as many."""
        layout = self._place.layout
        step = layout.tensor * (2 * layout.context if layout.context > 1 else 1)
        length = math.ceil(each_BT.shape[1] / step) * step
        filled_BT = functional.pad(each_BT, (0, length - each_BT.shape[1]))
        if layout.context == 1:
            return filled_BT
        places_C = places_of(length, dist.get_rank(self._place.context), layout.context)
        return filled_BT[:, places_C.to(each_BT.device)]

    def _score(
        self, micro: MicroBatch, logits_BCV: Tensor, temperature: float, entropy_gradient: bool
    ) -> tuple[Tensor, Tensor]:
        """(logprobs_BT, entropy_BT) of the targets; 0 outside the mask."""
        mask_BC, targets_BC = self._own(micro.mask_BT), self._own(micro.targets_BT)
        scored = from_split_logits(
            logits_BCV[mask_BC],
            targets_BC[mask_BC],
            temperature,
            entropy_gradient,
            self._place.tensor,
            self._shape.vocabulary,
        )
        zeros_BC = torch.zeros(mask_BC.shape, dtype=torch.float32, device=logits_BCV.device)
        logprobs_BT, entropy_BT = (self._whole(zeros_BC.masked_scatter(mask_BC, each_N), micro) for each_N in scored)
        return logprobs_BT, entropy_BT

    def _whole(self, each_BC: Tensor, micro: MicroBatch) -> Tensor:
        each_BT = gathered_positions(each_BC.T, self._place.context, added=False).T
        return each_BT[:, : micro.mask_BT.shape[1]]
