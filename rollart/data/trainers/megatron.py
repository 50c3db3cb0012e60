"""Megatron-Core, behind trainer megatron: a rank's part of a model, its passes, its optimizer. Nothing else imports it.

A rank holds the layers of its pipeline stage, its share of their matrices and experts, and its share of the optimizer.
Attention and norms are torch's, so that no other package is needed.

Invariants: losses are sums over tokens, which ranks add up, so whoever makes them divides; a weight knows whether ranks
of one tensor-parallel group hold the same of it. What this file leaves out: transformers' names, and what to learn.

Shape suffixes: B rows, T positions, C positions of this rank, V its share of the vocabulary, Q query heads, H key-value
heads, D head size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed, set_tensor_model_parallel_attributes
from megatron.core.transformer.module import Float16Module, MegatronModule
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn import functional

from rollart.config import Layout
from rollart.data.trainers.blocks import recompute
from rollart.data.trainers.context import gathered_positions, places_of
from rollart.data.trainers.learner import Adam

Take = Callable[[int, Tensor], tuple[Tensor, Any]]
"""From the number of a micro-batch and its logits_BCV to what is minimised, and what is kept; on the last stage."""


class Attention(MegatronModule):
    """Causal attention of this rank's heads and positions, by torch's own kernels."""

    def __init__(self, config: Any, pg_collection: Any, softmax_scale: float | None = None, **_: Any) -> None:
        super().__init__(config=config)
        self._scale, self._group = softmax_scale, pg_collection.cp

    def forward(self, query_CBQD: Tensor, key_CBHD: Tensor, value_CBHD: Tensor, *_: Any, **__: Any) -> Tensor:
        """[C, B, Q x D], as Megatron calls it; its mask is not looked at."""
        mask_CT = None
        if (size := dist.get_world_size(self._group)) > 1:
            length = size * len(query_CBQD)
            places_C1 = places_of(length, dist.get_rank(self._group), size).to(query_CBQD.device)[:, None]
            mask_CT = torch.arange(length, device=query_CBQD.device) <= places_C1
        key_TBHD, value_TBHD = (gathered_positions(each, self._group, added=True) for each in (key_CBHD, value_CBHD))
        query_BQCD, key_BHTD, value_BHTD = (each.permute(1, 2, 0, 3) for each in (query_CBQD, key_TBHD, value_TBHD))
        out_BQCD = functional.scaled_dot_product_attention(
            query_BQCD,
            key_BHTD,
            value_BHTD,
            attn_mask=mask_CT,
            is_causal=mask_CT is None,
            scale=self._scale,
            enable_gqa=query_BQCD.shape[1] != key_BHTD.shape[1],
        )
        return out_BQCD.permute(2, 0, 1, 3).flatten(2)


class Norm(torch.nn.RMSNorm):
    """Megatron's own wrapper of it knows nothing of positions that ranks share out."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


def meet(layout: Layout, timeout_s: float) -> None:
    """Form the groups of all ranks; those of a trainer before are left."""
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tensor,
        pipeline_model_parallel_size=layout.pipeline,
        context_parallel_size=layout.context,
        expert_model_parallel_size=layout.expert,
        expert_tensor_parallel_size=1,
        distributed_timeout_minutes=max(1, round(timeout_s / 60)),
    )
    model_parallel_cuda_manual_seed(1, inference_rng_tracker=True)  # nothing is drawn at random, but it is asked for


class Place:
    """Where this rank stands, once `meet` was called."""

    def __init__(self) -> None:
        self.tensor = parallel_state.get_tensor_model_parallel_group()
        self.context = parallel_state.get_context_parallel_group()
        self.pipeline = parallel_state.get_pipeline_model_parallel_group()
        self.experts = parallel_state.get_expert_model_parallel_group()
        self.data_rank: int = parallel_state.get_data_parallel_rank()
        self.data_size: int = parallel_state.get_data_parallel_world_size()
        self.is_first: bool = parallel_state.is_pipeline_first_stage()
        self.is_last: bool = parallel_state.is_pipeline_last_stage()
        self.last: int = parallel_state.get_pipeline_model_parallel_last_rank()
        """Of the last stage, counted among all ranks."""

    @property
    def speaks(self) -> bool:
        """Whether this rank counts, of those that compute the same."""
        return self.is_last and dist.get_rank(self.tensor) == 0 and dist.get_rank(self.context) == 0


class Stage:
    """This rank's part of a model. `settings`: of `TransformerConfig`; `head`: of `GPTModel`; both in Megatron's words.

    `trained`: whether gradients are wanted.
    """

    def __init__(
        self,
        settings: Mapping[str, Any],
        head: Mapping[str, Any],
        device: torch.device,
        recomputes: bool,
        trained: bool,
    ) -> None:
        self.place = Place()
        self._config = config = TransformerConfig(
            **settings,
            use_cpu_initialization=device.type == "cpu",
            perform_initialization=False,
            calculate_per_token_loss=True,
            variable_seq_lengths=True,
            moe_token_dispatcher_type="alltoall",
            cuda_graph_scope=[],
        )
        spec = get_gpt_layer_local_spec(
            num_experts=config.num_moe_experts, qk_layernorm=config.qk_layernorm, normalization="RMSNorm"
        )
        layer = spec.submodules
        layer.input_layernorm = layer.pre_mlp_layernorm = Norm
        layer.self_attention.submodules.core_attention = Attention
        if config.qk_layernorm:
            layer.self_attention.submodules.q_layernorm = layer.self_attention.submodules.k_layernorm = Norm
        stages = config.pipeline_model_parallel_size
        self.model = GPTModel(
            config=config,
            transformer_layer_spec=TransformerBlockSubmodules([spec] * (config.num_layers // stages), layer_norm=Norm),
            pre_process=self.place.is_first,
            post_process=self.place.is_last,
            position_embedding_type="rope",
            **head,
        ).to(device)
        self.first_layer = config.num_layers // stages * dist.get_rank(self.place.pipeline)
        if recomputes:
            recompute(self.model.decoder.layers)
        self.model.requires_grad_(trained)
        self._chunk: Any = Float16Module(config, self.model) if config.bf16 else self.model
        self._trained = trained

    def weights(self) -> dict[str, torch.nn.Parameter]:
        """By Megatron's names, layers counted from the first of this stage."""
        return dict(self.model.named_parameters())

    @staticmethod
    def mark_split(weight: torch.nn.Parameter, dimension: int) -> None:
        """Ranks of a tensor-parallel group hold different parts of a weight, so that all of them count in norms."""
        if not hasattr(weight, "tensor_model_parallel"):
            set_tensor_model_parallel_attributes(weight, True, dimension, 1)

    def complete(self) -> None:
        """The weights are there: get ready to train them."""
        if not self._trained:
            return
        buffers = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=True)
        self._chunk = DistributedDataParallel(self._config, buffers, self._chunk)
        self._config.no_sync_func = self._chunk.no_sync
        self._config.finalize_model_grads_func = finalize_model_grads

    def run(self, tokens: Sequence[Tensor], take: Take, backward: bool) -> list[Any]:
        """One pass over micro-batches of tokens_BC each; on the last stage, what `take` keeps of each."""
        numbers: Iterator[int] = iter(range(len(tokens)))
        none = torch.zeros((), dtype=torch.int, device=tokens[0].device)

        def forward(_: Any, model: Any) -> tuple[Tensor, Any]:
            number = next(numbers)
            tokens_BC = tokens[number]
            output = model(input_ids=tokens_BC, position_ids=None, attention_mask=None)

            def taken(logits_BCV: Tensor, non_loss_data: bool = False) -> Any:
                value, kept = take(number, logits_BCV)
                return kept if non_loss_data else (value, none.clone(), kept)

            return output, taken

        found: list[Any] = get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=None,
            model=[self._chunk],
            num_microbatches=len(tokens),
            seq_length=tokens[0].shape[1],
            micro_batch_size=tokens[0].shape[0],
            forward_only=not backward,
            collect_non_loss_data=not backward,
        )
        return found

    def optimizer(self, settings: Adam) -> MegatronAdam:
        """A new optimizer of all weights, in shards."""
        return MegatronAdam(self._chunk, settings, self._config.bf16)


class MegatronAdam:
    """Implements `learner.Optimizer`; vectors (norms, biases) are not decayed, which is Megatron's own rule."""

    def __init__(self, chunk: Any, settings: Adam, bf16: bool) -> None:
        self._chunk = chunk
        config = OptimizerConfig(
            lr=0.0,
            weight_decay=settings.weight_decay,
            adam_beta1=settings.beta1,
            adam_beta2=settings.beta2,
            bf16=bf16,
            use_distributed_optimizer=True,
        )
        self.inner = get_megatron_optimizer(config, [chunk])

    @property
    def has_state(self) -> bool:
        """Whether it has moved anything yet."""
        return any(len(each.optimizer.state) for each in self.inner.chained_optimizers)

    def save(self, folder: Path) -> None:
        """Of each group of ranks that hold the same, one writes; all ranks at once."""
        if not self.has_state:
            return
        self.inner.save_parameter_state(str(folder / f"parameters-{self._name}-{dist.get_rank(Place().experts)}.pt"))
        if parallel_state.get_data_parallel_rank(with_context_parallel=True) == 0:
            torch.save(self.inner.state_dict(), folder / f"settings-{self._name}.pt")

    def load(self, folder: Path) -> None:
        """Read what ranks of the same layout wrote, however many of them shared the data; all ranks at once."""
        if not (settings := folder / f"settings-{self._name}.pt").is_file():
            return
        self.inner.load_state_dict(torch.load(settings, weights_only=True))
        self.inner.load_parameter_state(str(folder / f"parameters-{self._name}-{dist.get_rank(Place().experts)}.pt"))

    @property
    def _name(self) -> str:
        place = Place()
        return f"{dist.get_rank(place.tensor)}-{dist.get_rank(place.pipeline)}"

    def zero(self) -> None:
        """Forget the gradients."""
        self._chunk.zero_grad_buffer()
        self.inner.zero_grad()

    def clip(self, limit: float) -> float:
        """The norm of all gradients, which are scaled down to `limit` where it is above."""
        self.inner.prepare_grads()
        norm = float(self.inner.get_grad_norm())
        for each in self.inner.chained_optimizers:
            if weights := each.get_parameters():
                clip_grad_by_total_norm_fp32(weights, limit, norm)
        return norm

    def step(self, learning_rate: float) -> None:
        """Move the weights."""
        for group in self.inner.param_groups:
            group["lr"] = learning_rate
        self.inner.step_with_ready_grads()
