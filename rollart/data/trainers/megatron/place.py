"""Which ranks share what: Megatron's groups, and this rank's place in them.

Invariant: the ranks of a pipeline stage are neighbours. What this file leaves out: what they share.
"""

from __future__ import annotations

import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from torch import Tensor

from rollart.config import Layout


def meet(layout: Layout, timeout_s: float) -> Place:
    """Form the groups of all ranks; those of a trainer before are left."""
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tensor,
        pipeline_model_parallel_size=layout.pipeline,
        context_parallel_size=layout.context,
        expert_model_parallel_size=layout.expert,
        expert_tensor_parallel_size=1,
        distributed_timeout_minutes=timeout_s / 60,
        create_gloo_process_groups=False,
    )
    model_parallel_cuda_manual_seed(1, inference_rng_tracker=True)  # nothing is drawn at random, but it is asked for
    return Place(layout)


class Place:
    """Where this rank stands, once the groups are formed."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.tensor = parallel_state.get_tensor_model_parallel_group()
        self.context = parallel_state.get_context_parallel_group()
        self.pipeline = parallel_state.get_pipeline_model_parallel_group()
        self.experts = parallel_state.get_expert_model_parallel_group()
        self.same_weights = parallel_state.get_data_parallel_group(with_context_parallel=True)
        self.same_experts = parallel_state.get_expert_data_parallel_group()
        self.data_rank: int = parallel_state.get_data_parallel_rank()
        self.stage: int = dist.get_rank(self.pipeline)
        self.stage_size = layout.ranks // layout.pipeline
        self.seat: int = dist.get_rank() % self.stage_size
        """Among the ranks of its stage."""

    @property
    def is_first(self) -> bool:
        """Whether this rank has the first layers."""
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        """Whether this rank has the last layers."""
        return self.stage == self.layout.pipeline - 1

    @property
    def speaks(self) -> bool:
        """Whether this rank counts, of those that compute the same."""
        return self.is_last and dist.get_rank(self.tensor) == 0 and dist.get_rank(self.context) == 0

    def told_by_last(self, tensor: Tensor) -> None:
        """Overwrite a tensor with that of the last stage."""
        if self.layout.pipeline > 1:
            dist.broadcast(tensor, parallel_state.get_pipeline_model_parallel_last_rank(), group=self.pipeline)
