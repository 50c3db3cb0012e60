"""The trainer on Megatron-Core: Llama and Qwen3, dense or with experts, over tensor, pipeline, context and expert
parallel ranks.

Invariants: weights are published and kept under transformers' names, so that engines and checkpoints never meet
Megatron's; steps are those of the embedded trainer, beyond rounding. What this file leaves out: Megatron itself
(`megatron.py`), and models that it has no words for, which are refused.

Shape suffixes: B rows, T positions, C positions of this rank, N trained positions, V its share of the vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional
from transformers import AutoConfig, AutoModelForCausalLM

from rollart.config import Layout
from rollart.data.trainers import shards
from rollart.data.trainers.checkpoint import SHARDS, check_reference, read_state
from rollart.data.trainers.context import gathered_positions, places_of
from rollart.data.trainers.learner import Adam, Loss
from rollart.data.trainers.megatron import MegatronAdam, Stage, meet
from rollart.data.trainers.megatron_names import Part, Shape, cut, parts, restored
from rollart.data.trainers.policy import PolicyTrainer
from rollart.data.trainers.ranks import Ranks
from rollart.data.trainers.scoring import load_model
from rollart.data.trainers.vocabulary import from_split_logits
from rollart.errors import ConfigError, RunFolderError
from rollart.learn.batching import MicroBatch, Sample, collate, deal
from rollart.sections import TrainConfig
from rollart.types import ParameterInfo

EMBEDDINGS, HEAD = "embedding.word_embeddings.weight", "output_layer.weight"
LAYOUT, REFERENCE = "layout.json", "reference"
LLAMA3 = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
"""What Megatron takes for granted."""
FAMILIES = ("llama", "qwen2", "qwen3", "qwen3_moe")


class MegatronLearner:
    """Implements `Learner`. `source`: a learner to copy; default: the model's files."""

    packs = False

    def __init__(
        self, folder: str, options: TrainConfig, layout: Layout, ranks: Ranks, source: MegatronLearner | None = None
    ) -> None:
        self._folder, self._options, self._layout, self._ranks = folder, options, layout, ranks
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
        self.shape = shape_of(config)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        self.shapes = {name: weight.shape for name, weight in model.named_parameters()}
        settings, head = _settings(config, self.shape, options, layout)
        self.stage = Stage(settings, head, ranks.device, options.activation_checkpointing, trained=source is None)
        self.place = self.stage.place
        if source is None:
            self.read(folder)
        else:
            self._copy(source)
        self.stage.complete()

    # ------------------------------------------------------------------------------------------------------- learning
    def deal(self, batches: Sequence[list[Sample]]) -> list[list[Sample]]:
        """Every data-parallel rank's share; the ranks that hold a model together have the same."""
        return deal(batches, self.place.data_size)[self.place.data_rank]

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
        for logprobs_BT in scored if self._layout.pipeline > 1 else ():
            dist.broadcast(logprobs_BT, self.place.last, group=self.place.pipeline)
        return scored

    def accumulate(self, batches: Sequence[MicroBatch], temperature: float, entropy_gradient: bool, loss: Loss) -> None:
        """Forward and backward passes of all micro-batches, as the pipeline schedules them."""

        def take(number: int, logits_BCV: Tensor) -> tuple[Tensor, Any]:
            return loss(number, *self._score(batches[number], logits_BCV, temperature, entropy_gradient)), None

        self.stage.run([self._own(each.tokens_BT) for each in batches], take, backward=True)

    def total(self, values: Mapping[str, float]) -> dict[str, float]:
        """Sums over the data-parallel ranks, each spoken for by one of those that compute the same."""
        return self._ranks.total(values, counts=self.place.speaks)

    def optimizer(self, settings: Adam) -> MegatronAdam:
        """Megatron's own, in shards."""
        return self.stage.optimizer(settings)

    def frozen(self) -> MegatronLearner:
        """Another model with the weights of this moment."""
        return MegatronLearner(self._folder, self._options, self._layout, self._ranks, source=self)

    def _own(self, each_BT: Tensor) -> Tensor:
        """This rank's positions, of rows that are filled up so that every rank gets as many."""
        step = self._layout.tensor * (2 * self._layout.context if self._layout.context > 1 else 1)
        length = math.ceil(each_BT.shape[1] / step) * step
        filled_BT = functional.pad(each_BT, (0, length - each_BT.shape[1]))
        if self._layout.context == 1:
            return filled_BT
        places_C = places_of(length, dist.get_rank(self.place.context), self._layout.context)
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
            self.place.tensor,
            self.shape.vocabulary,
        )
        zeros_BC = torch.zeros(mask_BC.shape, dtype=torch.float32, device=logits_BCV.device)
        logprobs_BT, entropy_BT = (self._whole(zeros_BC.masked_scatter(mask_BC, each_N), micro) for each_N in scored)
        return logprobs_BT, entropy_BT

    def _whole(self, each_BC: Tensor, micro: MicroBatch) -> Tensor:
        each_BT = gathered_positions(each_BC.T, self.place.context, added=False).T
        return each_BT[:, : micro.mask_BT.shape[1]]

    # -------------------------------------------------------------------------------------------------------- weights
    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """transformers' weights in float32, on the first rank, one at a time; the other ranks work along."""
        weights = self.stage.weights()
        for part in parts(self.shape):
            stage = self._stage_of(part)
            here = stage == dist.get_rank(self.place.pipeline)
            whole = restored(part, self._gather(part, weights), self.shape) if here else []
            for index, name in enumerate(part.sources):
                tensor = self._to_first(name, whole[index] if here else None, stage)
                if tensor is not None:
                    yield name, tensor.cpu()

    @torch.no_grad()
    def read(self, folder: str) -> None:
        """The first rank reads a model's files and tells all others, tensor by tensor; each keeps its own part."""
        source = dict(load_model(folder, "cpu").named_parameters()) if self._ranks.is_first else {}
        weights = self.stage.weights()
        for part in parts(self.shape):
            whole = [self._told(name, source) for name in part.sources]
            for name in self._names(part):
                self._fill(part, name, whole, weights)

    def _told(self, name: str, source: Mapping[str, Tensor]) -> Tensor:
        tensor = source[name].detach().to(self._ranks.device) if self._ranks.is_first else self._empty(name)
        self._ranks.broadcast(tensor)
        return tensor

    def _fill(self, part: Part, name: str, whole: list[Tensor], weights: Mapping[str, torch.nn.Parameter]) -> None:
        if part.join == "experts":
            group = self.place.experts
            own = cut(part, whole, self.shape, dist.get_rank(group), dist.get_world_size(group))
            for number, expert in enumerate(own):
                weights[name.format(number)].copy_(expert)
            return
        group = self.place.tensor
        weights[name].copy_(cut(part, whole, self.shape, dist.get_rank(group), dist.get_world_size(group)))
        if part.split is not None:
            self.stage.mark_split(weights[name], part.split)

    @torch.no_grad()
    def _copy(self, source: MegatronLearner) -> None:
        theirs = source.stage.weights()
        for name, weight in self.stage.weights().items():
            weight.copy_(theirs[name])

    def _stage_of(self, part: Part) -> int:
        if part.layer is not None:
            return part.layer // (self.shape.layers // self._layout.pipeline)
        return 0 if part.name == EMBEDDINGS else self._layout.pipeline - 1

    def _names(self, part: Part) -> list[str]:
        """What a part is called on this rank; nothing where it belongs to another stage. Tied embeddings are on two."""
        stage = dist.get_rank(self.place.pipeline)
        if part.name == EMBEDDINGS and self.shape.tied and self.place.is_last and not self.place.is_first:
            return [HEAD]
        if self._stage_of(part) != stage:
            return []
        layer = "" if part.layer is None else f"decoder.layers.{part.layer - self.stage.first_layer}."
        return [layer + part.name]

    def _gather(self, part: Part, weights: Mapping[str, Tensor]) -> list[Tensor]:
        """What all ranks that share a part hold of it, by now on each of them."""
        (name,) = self._names(part)
        group, own = self.place.tensor, weights.get(name)
        if own is None:
            group = self.place.experts
            number = self.shape.experts // self._layout.expert
            own = torch.stack([weights[name.format(each)] for each in range(number)])
        elif part.split is None:
            return [own.detach()]
        held = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
        dist.all_gather(held, own.detach().contiguous(), group=group)
        return held

    def _to_first(self, name: str, tensor: Tensor | None, stage: int) -> Tensor | None:
        """In float32, from the rank that speaks for a stage to the first of all, which has it then."""
        speaker = stage * (self._ranks.size // self._layout.pipeline)
        if self._ranks.is_first:
            if tensor is None:
                tensor = self._empty(name)
                dist.recv(tensor, speaker)
            return tensor.float()
        if self._ranks.rank == speaker:
            assert tensor is not None
            dist.send(tensor.float().contiguous(), 0)
        return None

    def _empty(self, name: str) -> Tensor:
        return torch.empty(self.shapes[name], device=self._ranks.device)


class MegatronTrainer(PolicyTrainer[MegatronLearner]):
    """Implements `protocols.Trainer` on one of `ranks`.

    `model_folder`: Hugging Face format. `temperature`: that of sampling. `seed`: order of the warm-up.
    Raises ConfigError for a model that Megatron cannot hold, or ranks that it cannot be laid out over.
    """

    _optimizer: MegatronAdam
    _reference: MegatronLearner | None

    def __init__(self, model_folder: str, options: TrainConfig, temperature: float, seed: int, ranks: Ranks) -> None:
        sizes = options.megatron
        self._layout = layout = Layout(
            ranks.size,
            options.tensor_parallel,
            sizes.pipeline_parallel,
            sizes.context_parallel,
            sizes.expert_parallel,
        )
        meet(layout, ranks.timeout_s)
        self._model_folder, self._ranks = model_folder, ranks
        super().__init__(MegatronLearner(model_folder, options, layout, ranks), options, temperature, seed)

    def parameters(self) -> list[ParameterInfo]:
        """Names, whole shapes and dtypes (`float32`) of what `tensors` yields."""
        return [ParameterInfo(name, tuple(shape), "float32") for name, shape in self._learner.shapes.items()]

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """The current weights on the first rank's CPU, one at a time; the other ranks work along, and get nothing."""
        return self._learner.tensors()

    # --------------------------------------------------------------------------------------------------- save and load
    def save(self, folder: str) -> None:
        """Write a checkpoint into an empty or new folder that all ranks see. Raises RunFolderError on all of them."""
        config = AutoConfig.from_pretrained(self._model_folder, local_files_only=True)
        models = {"": (config, self.tensors())}
        if self._reference is not None:
            models[REFERENCE] = config, self._reference.tensors()

        def rest(place: Path) -> None:
            self._optimizer.save(place)
            if self._ranks.is_first:
                (place / LAYOUT).write_bytes(msgspec.json.encode(self._layout))

        shards.write(folder, models, self._model_folder, rest, self._state(), self._ranks)

    def load(self, folder: str) -> None:
        """Go on from a checkpoint of the same layout, but for the ranks that share the data. Raises RunFolderError."""
        what = f"checkpoint {folder} cannot be read, or is of another model than {self._model_folder}"
        wanted, path = bool(self._options.kl_coef), Path(folder)
        with self._ranks.together(RunFolderError, what):
            state = read_state(folder)
            self._check_layout(path / SHARDS / LAYOUT)
            check_reference(folder, state, wanted, (path / REFERENCE).is_dir())
        self._learner.read(folder)
        self._optimizer = self._new_optimizer()
        with self._ranks.together(RunFolderError, what):
            self._optimizer.load(path / SHARDS)
        self._reference = None
        if wanted and (path / REFERENCE).is_dir():
            self._reference = self._learner.frozen()
            self._reference.read(str(path / REFERENCE))
        self._set_state(state)

    def _check_layout(self, file: Path) -> None:
        if not file.is_file():
            raise RunFolderError("it is not one of trainer 'megatron'; start anew from it as a model")
        saved = msgspec.json.decode(file.read_bytes(), type=Layout)
        if msgspec.structs.replace(saved, ranks=self._layout.ranks, context=self._layout.context) != self._layout:
            raise RunFolderError(f"its ranks were {saved}, now they are {self._layout}; only data and context may differ")


# ------------------------------------------------------------------------------------------------------- learning
    def deal(self, batches: Sequence[list[Sample]]) -> list[list[Sample]]:
        """Every data-parallel rank's share; the ranks that hold a model together have the same."""
        return deal(batches, self.place.data_size)[self.place.data_rank]

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
        for logprobs_BT in scored if self._layout.pipeline > 1 else ():
            dist.broadcast(logprobs_BT, self.place.last, group=self.place.pipeline)
        return scored

    def accumulate(self, batches: Sequence[MicroBatch], temperature: float, entropy_gradient: bool, loss: Loss) -> None:
        """Forward and backward passes of all micro-batches, as the pipeline schedules them."""

        def take(number: int, logits_BCV: Tensor) -> tuple[Tensor, Any]:
            return loss(number, *self._score(batches[number], logits_BCV, temperature, entropy_gradient)), None

        self.stage.run([self._own(each.tokens_BT) for each in batches], take, backward=True)

    def total(self, values: Mapping[str, float]) -> dict[str, float]:
        """Sums over the data-parallel ranks, each spoken for by one of those that compute the same."""
        return self._ranks.total(values, counts=self.place.speaks)

    def optimizer(self, settings: Adam) -> MegatronAdam:
        """Megatron's own, in shards."""
        return self.stage.optimizer(settings)

    def frozen(self) -> MegatronLearner:
        """Another model with the weights of this moment."""
        return MegatronLearner(self._folder, self._options, self._layout, self._ranks, source=self)

    def _own(self, each_BT: Tensor) -> Tensor:
        """This rank's positions, of rows that are filled up so that every rank gets as many."""
        step = self._layout.tensor * (2 * self._layout.context if self._layout.context > 1 else 1)
        length = math.ceil(each_BT.shape[1] / step) * step
        filled_BT = functional.pad(each_BT, (0, length - each_BT.shape[1]))
        if self._layout.context == 1:
            return filled_BT
        places_C = places_of(length, dist.get_rank(self.place.context), self._layout.context)
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
            self.place.tensor,
            self.shape.vocabulary,
        )
        zeros_BC = torch.zeros(mask_BC.shape, dtype=torch.float32, device=logits_BCV.device)
        logprobs_BT, entropy_BT = (self._whole(zeros_BC.masked_scatter(mask_BC, each_N), micro) for each_N in scored)
        return logprobs_BT, entropy_BT

    def _whole(self, each_BC: Tensor, micro: MicroBatch) -> Tensor:
        each_BT = gathered_positions(each_BC.T, self.place.context, added=False).T
        return each_BT[:, : micro.mask_BT.shape[1]]

    # -------------------------------------------------------------------------------------------------------- weights
    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """transformers' weights in float32, on the first rank, one at a time; the other ranks work along."""
        weights = self.stage.weights()
        for part in parts(self.shape):
            stage = self._stage_of(part)
            here = stage == dist.get_rank(self.place.pipeline)
            whole = restored(part, self._gather(part, weights), self.shape) if here else []
            for index, name in enumerate(part.sources):
                tensor = self._to_first(name, whole[index] if here else None, stage)
                if tensor is not None:
                    yield name, tensor.cpu()

    @torch.no_grad()
    def read(self, folder: str) -> None:
        """The first rank reads a model's files and tells all others, tensor by tensor; each keeps its own part."""
        source = dict(load_model(folder, "cpu").named_parameters()) if self._ranks.is_first else {}
        weights = self.stage.weights()
        for part in parts(self.shape):
            whole = [self._told(name, source) for name in part.sources]
            for name in self._names(part):
                self._fill(part, name, whole, weights)

    def _told(self, name: str, source: Mapping[str, Tensor]) -> Tensor:
        tensor = source[name].detach().to(self._ranks.device) if self._ranks.is_first else self._empty(name)
        self._ranks.broadcast(tensor)
        return tensor

    def _fill(self, part: Part, name: str, whole: list[Tensor], weights: Mapping[str, torch.nn.Parameter]) -> None:
        if part.join == "experts":
            group = self.place.experts
            own = cut(part, whole, self.shape, dist.get_rank(group), dist.get_world_size(group))
            for number, expert in enumerate(own):
                weights[name.format(number)].copy_(expert)
            return
        group = self.place.tensor
        weights[name].copy_(cut(part, whole, self.shape, dist.get_rank(group), dist.get_world_size(group)))
        if part.split is not None:
            self.stage.mark_split(weights[name], part.split)

    @torch.no_grad()
    def _copy(self, source: MegatronLearner) -> None:
        theirs = source.stage.weights()
        for name, weight in self.stage.weights().items():
            weight.copy_(theirs[name])

    def _stage_of(self, part: Part) -> int:
        if part.layer is not None:
            return part.layer // (self.shape.layers // self._layout.pipeline)
        return 0 if part.name == EMBEDDINGS else self._layout.pipeline - 1

    def _names(self, part: Part) -> list[str]:
        """What a part is called on this rank; nothing where it belongs to another stage. Tied embeddings are on two."""
        stage = dist.get_rank(self.place.pipeline)
        if part.name == EMBEDDINGS and self.shape.tied and self.place.is_last and not self.place.is_first:
            return [HEAD]
        if self._stage_of(part) != stage:
            return []
        layer = "" if part.layer is None else f"decoder.layers.{part.layer - self.stage.first_layer}."
        return [layer + part.name]

    def _gather(self, part: Part, weights: Mapping[str, Tensor]) -> list[Tensor]:
        """What all ranks that share a part hold of it, by now on each of them."""
        (name,) = self._names(part)
        group, own = self.place.tensor, weights.get(name)
        if own is None:
            group = self.place.experts
            number = self.shape.experts // self._layout.expert
            own = torch.stack([weights[name.format(each)] for each in range(number)])
        elif part.split is None:
            return [own.detach()]
        held = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
        dist.all_gather(held, own.detach().contiguous(), group=group)
        return held

    def _to_first(self, name: str, tensor: Tensor | None, stage: int) -> Tensor | None:
        """In float32, from the rank that speaks for a stage to the first of all, which has it then."""
        speaker = stage * (self._ranks.size // self._layout.pipeline)
        if self._ranks.is_first:
            if tensor is None:
                tensor = self._empty(name)
                dist.recv(tensor, speaker)
            return tensor.float()
        if self._ranks.rank == speaker:
            assert tensor is not None
            dist.send(tensor.float().contiguous(), 0)
        return None

    def _empty(self, name: str) -> Tensor:
        return torch.empty(self.shapes[name], device=self._ranks.device)


class MegatronTrainer(PolicyTrainer[MegatronLearner]):
    """Implements `protocols.Trainer` on one of `ranks`.

    `model_folder`: Hugging Face format. `temperature`: that of sampling. `seed`: order of the warm-up.
    Raises ConfigError for a model that Megatron cannot hold, or ranks that it cannot be laid out over.
    """

    _optimizer: MegatronAdam
    _reference: MegatronLearner | None

    def __init__(self, model_folder: str, options: TrainConfig, temperature: float, seed: int, ranks: Ranks) -> None:
        sizes = options.megatron
        self._layout = layout = Layout(
            ranks.size,
            options.tensor_parallel,
            sizes.pipeline_parallel,
            sizes.context_parallel,
            sizes.expert_parallel,
        )
        meet(layout, ranks.timeout_s)
        self._model_folder, self._ranks = model_folder, ranks
        super().__init__(MegatronLearner(model_folder, options, layout, ranks), options, temperature, seed)

    def parameters(self) -> list[ParameterInfo]:
        """Names, whole shapes and dtypes (`float32`) of what `tensors` yields."""
        return [ParameterInfo(name, tuple(shape), "float32") for name, shape in self._learner.shapes.items()]

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """The current weights on the first rank's CPU, one at a time; the other ranks work along, and get nothing."""
        return self._learner.tensors()

    def save(self, folder: str) -> None:
        """Write a checkpoint into an empty or new folder that all ranks see. Raises RunFolderError on all of them."""
        raise NotImplementedError

    def load(self, folder: str) -> None:
        """Go on from a checkpoint. Raises RunFolderError on all ranks."""
        raise NotImplementedError


# ----------------------------------------------------------------------------------------------------- Megatron's words
def shape_of(config: Any) -> Shape:
    """What of a config the names depend on. Raises ConfigError for a family that is not known here."""
    if config.model_type not in FAMILIES:
        raise ConfigError(
            f"trainer: 'megatron' knows {', '.join(FAMILIES)}, not {config.model_type!r}; take trainer = 'fsdp2'"
        )
    return Shape(
        layers=config.num_hidden_layers,
        heads=config.num_attention_heads,
        key_value_heads=config.num_key_value_heads,
        vocabulary=config.vocab_size,
        tied=config.tie_word_embeddings,
        head_norms=config.model_type.startswith("qwen3"),
        biases=config.model_type == "qwen2" or bool(getattr(config, "attention_bias", False)),
        experts=getattr(config, "num_experts", 0),
    )


def _settings(config: Any, shape: Shape, options: TrainConfig, layout: Layout) -> tuple[dict[str, Any], dict[str, Any]]:
    """The arguments of Megatron's config and of its model. Raises ConfigError for what they cannot say."""
    _check(config, shape, layout)
    bf16 = options.precision == "bfloat16"
    kind = torch.bfloat16 if bf16 else torch.float32
    settings = {
        "num_layers": shape.layers,
        "hidden_size": config.hidden_size,
        "ffn_hidden_size": config.intermediate_size,
        "num_attention_heads": shape.heads,
        "num_query_groups": shape.key_value_heads,
        "kv_channels": getattr(config, "head_dim", None) or config.hidden_size // shape.heads,
        "layernorm_epsilon": config.rms_norm_eps,
        "normalization": "RMSNorm",
        "qk_layernorm": shape.head_norms,
        "add_bias_linear": False,
        "add_qkv_bias": shape.biases,
        "gated_linear_unit": True,
        "activation_func": functional.silu,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "bf16": bf16,
        "params_dtype": kind,
        "pipeline_dtype": kind,
        "tensor_model_parallel_size": layout.tensor,
        "pipeline_model_parallel_size": layout.pipeline,
        "context_parallel_size": layout.context,
        "expert_model_parallel_size": layout.expert,
        "expert_tensor_parallel_size": 1,
        "sequence_parallel": layout.tensor > 1,
    }
    if shape.experts:
        settings |= {
            "num_moe_experts": shape.experts,
            "moe_ffn_hidden_size": config.moe_intermediate_size,
            "moe_router_topk": config.num_experts_per_tok,
            "moe_router_load_balancing_type": "none",
            "moe_router_dtype": "fp32",
        }
    head = {
        "vocab_size": math.ceil(shape.vocabulary / layout.tensor) * layout.tensor,
        "max_sequence_length": config.max_position_embeddings,
        "share_embeddings_and_output_weights": shape.tied,
        "rotary_base": config.rope_parameters["rope_theta"],
    }
    if config.rope_parameters.get("rope_type") == "llama3":
        head |= {"rope_scaling": True, "rope_scaling_factor": config.rope_parameters["factor"]}
    return settings, head


def _check(config: Any, shape: Shape, layout: Layout) -> None:
    """Raises ConfigError for a model or a layout that Megatron, or what is known of it here, cannot hold."""
    for key, number, size in (
        ("train.megatron.pipeline_parallel", shape.layers, layout.pipeline),
        ("train.tensor_parallel", shape.heads, layout.tensor),
        ("train.tensor_parallel", shape.key_value_heads, layout.tensor),
        ("train.megatron.expert_parallel", shape.experts, layout.expert),
    ):
        if number % size or (size > 1 and not number):
            what = {shape.layers: "layers", shape.experts: "experts"}.get(number, "attention or key-value heads")
            raise ConfigError(f"{key}: {size} does not divide the model's {number} {what}")
    rope = config.rope_parameters
    known = rope.get("rope_type", "default") == "default" or all(rope.get(key) == LLAMA3[key] for key in LLAMA3)
    if not known:
        raise ConfigError(
            f"trainer: 'megatron' knows plain rotary positions and those of Llama 3, not {rope}; take trainer = 'fsdp2'"
        )
    if shape.experts and (config.decoder_sparse_step != 1 or config.mlp_only_layers or not config.norm_topk_prob):
        raise ConfigError("trainer: 'megatron' knows mixtures with experts in every layer; take trainer = 'fsdp2'")
