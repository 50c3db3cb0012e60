"""The trainer of several ranks on PyTorch's own sharding: FSDP2, and tensor parallel as transformers plans it.

Invariants: steps on any number of ranks are those of the embedded trainer, beyond rounding; no rank ever holds more
than its shards, the layer at work and what surrounds the layers, save for one whole tensor at a time while weights
are published. What this file leaves out: laying the model out (`sharding.py`), checkpoints (`shards.py`).

Shape suffixes: B rows of a micro-batch, T positions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from rollart.data.trainers import shards
from rollart.data.trainers.checkpoint import check_reference
from rollart.data.trainers.learner import Adam, AdamW, Loss
from rollart.data.trainers.lora import adapter, complete
from rollart.data.trainers.policy import PolicyTrainer
from rollart.data.trainers.ranks import Ranks
from rollart.data.trainers.sharding import Sharded, gathered, mesh_of, own, shard
from rollart.errors import RunFolderError
from rollart.learn.batching import MicroBatch, Sample, deal
from rollart.sections import TrainConfig
from rollart.types import ParameterInfo


class ShardedLearner:
    """Implements `Learner`. `build`: the model from its files again, for a copy that stays as it is."""

    def __init__(self, build: Callable[[], Sharded], ranks: Ranks, tensor_parallel: int) -> None:
        self._build, self._ranks, self._tensor_parallel = build, ranks, tensor_parallel
        self.sharded = build()
        self.packs = self.sharded.scorer.packs
        self._num_shares = ranks.size // tensor_parallel

    def deal(self, batches: Sequence[list[Sample]]) -> list[list[Sample]]:
        """Every data-parallel rank's share; ranks that split matrices between them have the same."""
        return deal(batches, self._num_shares)[self._ranks.rank // self._tensor_parallel]

    def collate(self, samples: Sequence[Sample]) -> MicroBatch:
        """A micro-batch as the model takes it best."""
        return self.sharded.scorer.collate(samples)

    @torch.no_grad()
    def logprobs(self, batches: Sequence[MicroBatch], temperature: float) -> list[Tensor]:
        """logprobs_BT of each micro-batch; 0 outside the mask."""
        scored = [self.sharded.scoring(micro, temperature, False)[0] for micro in batches]
        self.sharded.scoring.reshard()  # without a backward pass the root stays gathered
        return scored

    def accumulate(self, batches: Sequence[MicroBatch], temperature: float, entropy_gradient: bool, loss: Loss) -> None:
        """One forward and backward pass per micro-batch. FSDP takes means over ranks, where we want sums."""
        for index, micro in enumerate(batches):
            value = loss(index, *self.sharded.scoring(micro, temperature, entropy_gradient))
            (value * self._num_shares).backward()

    def total(self, values: Mapping[str, float]) -> dict[str, float]:
        """Sums over the data-parallel ranks."""
        return self._ranks.total(values, counts=self._ranks.rank % self._tensor_parallel == 0)

    def optimizer(self, settings: Adam) -> AdamW:
        """AdamW over shards."""
        return AdamW(self.sharded.model, settings, clip_shards, _mesh)

    @torch.no_grad()
    def frozen(self) -> ShardedLearner:
        """The model loaded once more, then given the weights of this moment, shard by shard."""
        copy = ShardedLearner(self._build, self._ranks, self._tensor_parallel)
        copy.sharded.model.requires_grad_(False)
        pairs = zip(copy.sharded.model.parameters(), self.sharded.model.parameters(), strict=True)
        for theirs, ours in pairs:
            own(theirs).copy_(own(ours))
        return copy


class FsdpTrainer(PolicyTrainer[ShardedLearner]):
    """Implements `protocols.Trainer` on one of `ranks`.

    `model_folder`: Hugging Face format. `temperature`: that of sampling. `seed`: order of the warm-up.
    Raises ConfigError when the model cannot be loaded or laid out.
    """

    _optimizer: AdamW
    _reference: ShardedLearner | None

    def __init__(self, model_folder: str, options: TrainConfig, temperature: float, seed: int, ranks: Ranks) -> None:
        self._model_folder, self._ranks = model_folder, ranks
        mesh = mesh_of(ranks, options.tensor_parallel)

        def build() -> Sharded:
            return shard(model_folder, options, ranks, mesh, seed)

        super().__init__(ShardedLearner(build, ranks, options.tensor_parallel), options, temperature, seed)

    # -------------------------------------------------------------------------------------------------------- weights
    def parameters(self) -> list[ParameterInfo]:
        """Names, whole shapes and dtypes (`float32`) of what `tensors` yields, in its order."""
        return [
            ParameterInfo(name, tuple(weight.shape), str(weight.dtype).removeprefix("torch."))
            for name, weight in self._published()
        ]

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """What is published, on the first rank's CPU, one at a time; the other ranks gather along, and get nothing.

        A tied weight appears once, under its first name. With an adapter it is the adapter alone.
        """
        return self._on_first((name, gathered(weight.detach())) for name, weight in self._published())

    def _published(self) -> Iterable[tuple[str, Tensor]]:
        model = self._learner.sharded.model
        return adapter(model) if self._options.lora.r else model.named_parameters()

    def _complete(self) -> Iterator[tuple[str, Tensor]]:
        """The whole model, as `tensors`."""
        model = self._learner.sharded.model
        if self._options.lora.r:
            return self._on_first(complete(model, self._options.lora, gathered))
        return self.tensors()

    def _on_first(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in tensors:
            if self._ranks.is_first:
                yield name, tensor.cpu().contiguous()

    # --------------------------------------------------------------------------------------------------- save and load
    def save(self, folder: str) -> None:
        """Write a checkpoint into an empty or new folder that all ranks see. Raises RunFolderError on all of them."""
        config, held = self._learner.sharded.model.config, self._held()
        shards.write(folder, config, self._model_folder, self._complete(), held, self._state(), self._ranks)

    def load(self, folder: str) -> None:
        """Go on from a checkpoint of any number of ranks. Raises RunFolderError on all of them."""
        what = f"checkpoint {folder} cannot be read, or is of another model than {self._model_folder}"
        wanted = bool(self._options.kl_coef)
        with self._ranks.together(RunFolderError, what):
            saved = shards.Saved(folder)
            reference = saved.under("reference/")
            check_reference(folder, saved.state, wanted, bool(reference))
        self._reference = self._learner.frozen() if wanted and reference else None
        with self._ranks.together(RunFolderError, what):
            self._optimizer.prepare(saved.under("optimizer/"))
            saved.load(self._held())
        self._set_state(saved.state)

    def _held(self) -> dict[str, Tensor]:
        """This rank's shards of all that is not read from the model's files."""
        held = {f"model/{name}": tensor for name, tensor in _trained(self._learner.sharded.model)}
        held |= {f"optimizer/{name}": tensor for name, tensor in self._optimizer.tensors()}
        if self._reference is not None:
            of_reference = dict(self._reference.sharded.model.named_parameters())
            held |= {f"reference/{name}": of_reference[name] for name, _ in _trained(self._learner.sharded.model)}
        return {name: tensor.detach() for name, tensor in held.items()}


def _trained(model: Any) -> Iterator[tuple[str, Tensor]]:
    return ((name, weight) for name, weight in model.named_parameters() if weight.requires_grad)


def _mesh(weight: Tensor) -> object:
    return weight.device_mesh if isinstance(weight, DTensor) else None


def clip_shards(weights: list[torch.nn.Parameter], limit: float) -> Tensor:
    """As `clip_grad_norm_`, for shards of different meshes: norms of each are gathered, then put together."""
    kinds: dict[object, list[Tensor]] = {}
    for weight in weights:
        assert weight.grad is not None
        kinds.setdefault(_mesh(weight.grad), []).append(weight.grad)
    norms = [gathered(torch.nn.utils.get_total_norm(gradients)) for gradients in kinds.values()]
    total = torch.linalg.vector_norm(torch.stack(norms))
    scale = (limit / (total + 1e-6)).clamp(max=1.0)
    for gradient in (each for gradients in kinds.values() for each in gradients):
        own(gradient).mul_(scale)
    return total
