"""What policy training steps on: a model that one process holds, or many in shards.

Invariant: the ranks of a learner make the same calls in the same order, and each is told the same numbers, so that no
rank ever decides alone. What this file leaves out: losses and steps (`policy.py`), models in shards (`fsdp.py`).

Shape suffixes: B rows of a micro-batch, T positions.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from rollart.data.trainers.scoring import Scorer
from rollart.learn.batching import MicroBatch, Sample

Loss = Callable[[int, Tensor, Tensor], Tensor]
"""From the number of a micro-batch, logprobs_BT and entropy_BT to what its tokens add to the loss."""


class Adam(NamedTuple):
    """The settings of an optimizer. `fused`: one kernel for all of a step."""

    beta1: float
    beta2: float
    weight_decay: float = 0.0
    fused: bool = True


class Optimizer(Protocol):
    """Moves the weights along gradients that `Learner.accumulate` has left."""

    def zero(self) -> None:
        """Forget the gradients."""
        ...

    def clip(self, limit: float) -> float:
        """The norm of all gradients, which are scaled down to `limit` where it is above."""
        ...

    def step(self, learning_rate: float) -> None:
        """Move the weights."""
        ...


class Learner(Protocol):
    """A model that can be scored and trained. Every method is called by all of its ranks."""

    packs: bool
    """Whether rows that begin alike are computed together."""

    def deal(self, batches: Sequence[list[Sample]]) -> list[list[Sample]]:
        """This rank's share of the micro-batches, as many as every other rank's."""
        ...

    def collate(self, samples: Sequence[Sample]) -> MicroBatch:
        """A micro-batch as the model takes it best."""
        ...

    def logprobs(self, batches: Sequence[MicroBatch], temperature: float) -> list[Tensor]:
        """logprobs_BT of each micro-batch; 0 outside the mask."""
        ...

    def accumulate(self, batches: Sequence[MicroBatch], temperature: float, entropy_gradient: bool, loss: Loss) -> None:
        """Add the gradient of all losses, of all ranks, to what is there."""
        ...

    def total(self, values: Mapping[str, float]) -> dict[str, float]:
        """Each value summed over the ranks' shares of the batch."""
        ...

    def optimizer(self, settings: Adam) -> Optimizer:
        """A new optimizer of the weights that are trained."""
        ...

    def frozen(self) -> Learner:
        """Another learner with the weights of this moment."""
        ...


Clip = Callable[[list[torch.nn.Parameter], float], Tensor]
"""Scales the gradients of weights down to a norm; the norm that they had."""


class AdamW:
    """torch's AdamW over what is trained of a model; vectors (norms, biases) are not decayed.

    `kind`: weights of different kinds, such as those of different meshes, are never put into one kernel.
    """

    def __init__(
        self, model: Any, settings: Adam, clip: Clip, kind: Callable[[torch.nn.Parameter], object] = lambda _: None
    ) -> None:
        self.model, self._clip = model, clip
        groups: dict[object, list[torch.nn.Parameter]] = {}
        for weight in model.parameters():
            if weight.requires_grad:
                groups.setdefault((weight.ndim <= 1, kind(weight)), []).append(weight)
        decay = settings.weight_decay
        self.inner = torch.optim.AdamW(
            [{"params": weights, "weight_decay": decay if weights[0].ndim > 1 else 0.0} for weights in groups.values()],
            betas=(settings.beta1, settings.beta2),
            fused=settings.fused,
        )

    def zero(self) -> None:
        """Forget the gradients."""
        self.inner.zero_grad(set_to_none=True)

    def clip(self, limit: float) -> float:
        """The norm of all gradients, which are scaled down to `limit` where it is above."""
        return float(self._clip([weight for weight in self.model.parameters() if weight.grad is not None], limit))

    def step(self, learning_rate: float) -> None:
        """Move the weights."""
        for group in self.inner.param_groups:
            group["lr"] = learning_rate
        self.inner.step()

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """(parameter/key, tensor) of its state."""
        for name, weight in self.model.named_parameters():
            for key, value in self.inner.state.get(weight, {}).items():
                yield f"{name}/{key}", value

    def prepare(self, names: Sequence[str]) -> None:
        """Make a state of zeros of the names that `tensors` gives, to be overwritten."""
        self.inner.state.clear()
        weights = dict(self.model.named_parameters())
        for path in names:
            name, _, key = path.rpartition("/")
            weight = weights.get(name)
            if weight is not None:
                empty = torch.zeros((), device=weight.device) if key == "step" else torch.zeros_like(weight)
                self.inner.state[weight][key] = empty

    def set_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """The inverse of `tensors`."""
        self.inner.state.clear()
        weights = dict(self.model.named_parameters())
        for path, value in tensors.items():
            name, _, key = path.rpartition("/")
            self.inner.state[weights[name]][key] = value.to(weights[name].device)


class WholeLearner:
    """Implements `Learner` in one process."""

    def __init__(self, scorer: Scorer) -> None:
        self.scorer = scorer
        self.packs = scorer.packs

    def deal(self, batches: Sequence[list[Sample]]) -> list[list[Sample]]:
        """All of them."""
        return list(batches)

    def collate(self, samples: Sequence[Sample]) -> MicroBatch:
        """A micro-batch as the model takes it best."""
        return self.scorer.collate(samples)

    @torch.no_grad()
    def logprobs(self, batches: Sequence[MicroBatch], temperature: float) -> list[Tensor]:
        """logprobs_BT of each micro-batch; 0 outside the mask."""
        return [self.scorer.score(micro, temperature)[0] for micro in batches]

    def accumulate(self, batches: Sequence[MicroBatch], temperature: float, entropy_gradient: bool, loss: Loss) -> None:
        """One forward and backward pass per micro-batch."""
        for index, micro in enumerate(batches):
            loss(index, *self.scorer.score(micro, temperature, entropy_gradient)).backward()

    def total(self, values: Mapping[str, float]) -> dict[str, float]:
        """The values themselves."""
        return dict(values)

    def optimizer(self, settings: Adam) -> AdamW:
        """AdamW with torch's own clipping."""
        return AdamW(self.scorer.model, settings, torch.nn.utils.clip_grad_norm_)

    def frozen(self) -> WholeLearner:
        """A copy of the model."""
        return WholeLearner(Scorer(copy.deepcopy(self.scorer.model).requires_grad_(False)))
