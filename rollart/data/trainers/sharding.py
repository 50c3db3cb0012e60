"""A Hugging Face model over several ranks: every matrix split by FSDP2, and by transformers' own tensor-parallel plan.

The first rank reads the files; the others hold an empty model of the same shape, into which every tensor is broadcast
alone and cut. So the whole model stands once, in the first rank's main memory, while it is loaded. What surrounds the
layers (embeddings, last norm, head) is gathered once per forward pass and kept until its end, because the head runs in
chunks, of which ranks may have different numbers.

Invariants: all ranks build the same modules in the same order; weights and optimizer are float32, `precision` is what
matrices are multiplied in. Gradients are reduced after every micro-batch: the hooks that transformers puts on some
weights of a tensor-parallel model would count a gradient that stays for the next one twice.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers.distributed.tensor_parallel import apply_tensor_parallelism

from rollart.data.trainers.attention import ATTENTION
from rollart.data.trainers.blocks import layers_of, recompute
from rollart.data.trainers.lora import add_adapter
from rollart.data.trainers.ranks import Ranks
from rollart.data.trainers.scoring import Scorer, Traits, empty_model, load_model
from rollart.errors import ConfigError, boundary
from rollart.learn.batching import MicroBatch
from rollart.sections import LoraConfig, TrainConfig


class Sharded(NamedTuple):
    """A model in shards. `scoring` is what runs it: every pass over the model is a call of that `Scoring`."""

    scorer: Scorer
    scoring: Any

    @property
    def model(self) -> Any:
        """The model itself, with transformers' names."""
        return self.scorer.model


class Scoring(nn.Module):
    """The scorer as the root module of FSDP, so that all that it does with the model is one forward pass."""

    def __init__(self, scorer: Scorer) -> None:
        super().__init__()
        self.model = scorer.model
        self._scorer = scorer

    def forward(self, micro: MicroBatch, temperature: float, entropy_gradient: bool) -> tuple[Tensor, Tensor]:
        """See `Scorer.score`."""
        return self._scorer.score(micro, temperature, entropy_gradient)


def mesh_of(ranks: Ranks, tensor_parallel: int) -> DeviceMesh:
    """Ranks as a table: data parallel down, tensor parallel across, whose ranks are neighbours."""
    shape = (ranks.size // tensor_parallel, tensor_parallel)
    return init_device_mesh(ranks.device.type, shape, mesh_dim_names=("data", "tensor"))


def shard(folder: str, options: TrainConfig, ranks: Ranks, mesh: DeviceMesh, seed: int) -> Sharded:
    """The model of a folder, in shards, with the adapter that `seed` gives. Raises ConfigError when that cannot be."""
    source, traits = _source(folder, options.lora, ranks, seed)
    with boundary(ConfigError, f"model.name: laying out the model in {folder} over {ranks.size} ranks"):
        model = empty_model(folder)
        if traits.packs:
            model.set_attn_implementation(ATTENTION)
        if options.lora.r:
            add_adapter(model, options.lora, seed)
        if options.tensor_parallel > 1:
            _split_by_plan(model, mesh["tensor"])
        if options.activation_checkpointing:
            recompute(layers_of(model))
        scorer = Scorer(model, traits=traits)
        scoring = _fully_sharded(Scoring(scorer), mesh["data"], options.precision)
        scoring.to_empty(device=ranks.device)
    fill(model, source, ranks)
    scorer.device = ranks.device
    return Sharded(scorer, scoring)


def _source(folder: str, lora: LoraConfig, ranks: Ranks, seed: int) -> tuple[Mapping[str, Tensor], Traits]:
    """The weights and buffers, on the first rank, and on all ranks how the model can be scored."""
    if not ranks.is_first:
        return {}, Traits(*ranks.share(b""))
    model = load_model(folder, "cpu")
    traits = Scorer(model).traits
    ranks.share(bytes(traits))
    if lora.r:
        add_adapter(model, lora, seed)
    return dict(itertools.chain(model.named_parameters(), model.named_buffers())), traits


def _split_by_plan(model: Any, mesh: DeviceMesh) -> None:
    """Tensor parallel as the model's own plan says; a head that is tied to the embeddings is split like them."""
    config = model.config.get_text_config()
    for key in ("num_attention_heads", "num_key_value_heads"):
        if (number := getattr(config, key, None) or mesh.size()) % mesh.size():
            raise ConfigError(f"train.tensor_parallel: {mesh.size()} does not divide the model's {key} {number}")
    head = model.get_output_embeddings()
    if head.weight is model.get_input_embeddings().weight:
        head.weight = nn.Parameter(torch.empty_like(head.weight))
    apply_tensor_parallelism(model, mesh, _expanded(model))
    model.tie_weights()


def _expanded(model: Any) -> dict[str, str]:
    """The plan with a line for every module and weight: its rules name layers by a star. Raises ConfigError."""
    if not model.tp_plan:
        raise ConfigError(
            f"train.tensor_parallel: transformers has no tensor-parallel plan for {type(model).__name__}; set it to 1"
        )
    plan: dict[str, str] = {}
    for name, module in model.named_modules():
        style = model.tp_plan.get(_starred(name))
        for weight, _ in module.named_parameters(recurse=False):
            if (own := model.tp_plan.get(_starred(f"{name}.{weight}"), style)) is not None:
                plan[f"{name}.{weight}"] = own
        if style is not None:
            plan[name] = style
    return plan


def _starred(name: str) -> str:
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)


def _fully_sharded(scoring: Scoring, mesh: DeviceMesh, precision: str) -> Any:
    """Each layer is gathered for its own work; all the rest with the root."""
    policy = MixedPrecisionPolicy()
    if precision == "bfloat16":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in layers_of(scoring.model):
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(scoring, mesh=mesh, mp_policy=policy)
    return scoring


@torch.no_grad()
def fill(model: Any, source: Mapping[str, Tensor], ranks: Ranks) -> None:
    """Overwrite weights and buffers with the first rank's, one after the other."""
    for name, held in itertools.chain(model.named_parameters(), model.named_buffers()):
        if ranks.is_first:
            whole = source[name].detach().to(device=ranks.device, dtype=held.dtype).contiguous()
        else:
            whole = torch.empty(held.shape, dtype=held.dtype, device=ranks.device)
        ranks.broadcast(whole)
        own(held).copy_(own(distribute_as(held, whole)))


def distribute_as(held: Tensor, whole: Tensor) -> Tensor:
    """This rank's part of a tensor that every rank has, cut as `held` is."""
    if not isinstance(held, DTensor):
        return whole
    return distribute_tensor(whole, held.device_mesh, held.placements, src_data_rank=None)


def own(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def gathered(tensor: Tensor) -> Tensor:
    """All of a tensor, gathered from the ranks that hold it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
