"""A rank's part of a model: the layers of its pipeline stage, its share of their matrices and experts; and its passes.

Invariant: losses are sums over tokens, which ranks add up, so whoever makes them divides. What this file leaves out:
transformers' names, and what to learn.

Shape suffixes: B rows, C positions of this rank, V its share of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn import Parameter

from rollart.data.trainers.blocks import recompute
from rollart.data.trainers.learner import Adam
from rollart.data.trainers.megatron.adam import MegatronAdam
from rollart.data.trainers.megatron.layers import layers
from rollart.data.trainers.megatron.place import Place

Take = Callable[[int, Tensor], tuple[Tensor, Any]]
"""From the number of a micro-batch and its logits_BCV to what is minimised, and what is kept; on the last stage."""


class Stage:
    """`settings`: of `TransformerConfig`; `head`: of `GPTModel`; both in Megatron's words.

    `trained`: whether gradients are wanted.
    """

    def __init__(
        self,
        settings: Mapping[str, Any],
        head: Mapping[str, Any],
        place: Place,
        device: torch.device,
        recomputes: bool,
        trained: bool,
    ) -> None:
        self.place, self._trained = place, trained
        self._config = config = TransformerConfig(
            **settings,
            use_cpu_initialization=device.type == "cpu",
            perform_initialization=False,
            calculate_per_token_loss=True,
            variable_seq_lengths=True,
            moe_token_dispatcher_type="alltoall",
            cuda_graph_scope=[],
        )
        num_layers = config.num_layers // config.pipeline_model_parallel_size
        self.first_layer = num_layers * place.stage
        self.model = GPTModel(
            config=config,
            transformer_layer_spec=layers(config, num_layers),
            pre_process=place.is_first,
            post_process=place.is_last,
            position_embedding_type="rope",
            **head,
        ).to(device)
        if recomputes:
            recompute(self.model.decoder.layers)
        self.model.requires_grad_(trained)
        self._chunk: Any = Float16Module(config, self.model) if config.bf16 else self.model

    def weights(self) -> dict[str, Parameter]:
        """By Megatron's names, layers counted from the first of this stage."""
        return dict(self.model.named_parameters())

    @staticmethod
    def mark_split(weight: Parameter, dimension: int) -> None:
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
            output = model(input_ids=tokens[number], position_ids=None, attention_mask=None)

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
        return MegatronAdam(self._chunk, settings, self._config.bf16, self.place)
