"""A rank's part of Megatron's distributed optimizer, and its state as whole tensors.

Ranks that hold the same weights share out their moments, and where matrices are bfloat16 their float32 originals, as
stretches of numbers that know nothing of a tensor's shape.

Invariant: a state that is read is in the shape of this rank's weight, whatever stretches its ranks have. What this file
leaves out: how weights are cut over ranks that hold different parts (`holding.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from torch import Tensor
from torch.nn import Parameter

from rollart.data.trainers.learner import Adam
from rollart.data.trainers.megatron.place import Place

MASTER = "master"
"""Of the state of a weight: the weight itself in float32."""
MOMENTS = ("exp_avg", "exp_avg_sq")


class MegatronAdam:
    """Implements `learner.Optimizer`; vectors (norms, biases) are not decayed.

    `chunk`: the model that it was made for, as `Stage.complete` wrapped it.
    """

    def __init__(self, chunk: Any, settings: Adam, bf16: bool, place: Place) -> None:
        self._chunk, self._place, self._decay = chunk, place, settings.weight_decay
        config = OptimizerConfig(
            lr=0.0,
            weight_decay=settings.weight_decay,
            adam_beta1=settings.beta1,
            adam_beta2=settings.beta2,
            bf16=bf16,
            use_distributed_optimizer=True,
        )
        self._inner = get_megatron_optimizer(config, [chunk], use_gloo_process_groups=False)
        self.steps = 0
        """How often it has moved the weights, which is when it has moments."""

    def zero(self) -> None:
        """Forget the gradients."""
        self._chunk.zero_grad_buffer()
        self._inner.zero_grad()

    def clip(self, limit: float) -> float:
        """The norm of all gradients, which are scaled down to `limit` where it is above."""
        self._inner.prepare_grads()
        norm = float(self._inner.get_grad_norm())
        for each in self._inner.chained_optimizers:
            if weights := each.get_parameters():
                clip_grad_by_total_norm_fp32(weights, limit, norm)
        return norm

    def step(self, learning_rate: float) -> None:
        """Move the weights."""
        for group in self._inner.param_groups:  # as Megatron's schedulers would
            group["lr"], group["weight_decay"] = learning_rate, self._decay * group["wd_mult"]
        self._inner.step_with_ready_grads()
        self.steps += 1

    # ---------------------------------------------------------------------------------------------------------- state
    def whole(self, weight: Parameter, key: str) -> Tensor:
        """The state of a weight, in its shape and float32; all ranks that hold the weight at once."""
        flat = torch.zeros(weight.numel(), dtype=torch.float32, device=weight.device)
        for stretch, state in self._owned(weight):
            flat[stretch] = state[key].detach().float()
        is_expert = not getattr(weight, "allreduce", True)
        dist.all_reduce(flat, group=self._place.same_experts if is_expert else self._place.same_weights)
        return flat.view(weight.shape)

    def prepare(self, steps: int) -> None:
        """Have moments of zeros after `steps` steps, to be overwritten."""
        self.steps = steps
        for each in self._inner.chained_optimizers:
            counts = isinstance(each.optimizer, torch.optim.Adam | torch.optim.AdamW)
            for group in each.optimizer.param_groups:
                if not counts:
                    group["step"] = steps
                for master in group["params"]:
                    state = {moment: torch.zeros_like(master, dtype=torch.float32) for moment in MOMENTS}
                    count = {"step": torch.tensor(float(steps))} if counts else {}
                    each.optimizer.state[master] = {**state, **count}

    def overwrite(self, weight: Parameter, key: str, whole: Tensor) -> None:
        """The inverse of `whole`; every rank for itself."""
        for stretch, state in self._owned(weight):
            state[key].data.copy_(whole.flatten()[stretch])

    def _owned(self, weight: Parameter) -> Iterator[tuple[slice, dict[str, Tensor]]]:
        """The stretch of a weight that is this rank's, if there is one, and its state."""
        for each in self._inner.chained_optimizers:
            if weight not in each.model_param_gbuf_map:
                continue
            buffer, kind, bucket = each.model_param_gbuf_map[weight]
            stretch = each.gbuf_ranges[buffer][kind][bucket]["param_map"][weight]["param"]
            group, index = each.model_param_group_index_map[weight]
            master = each.optimizer.param_groups[group]["params"][index]
            yield slice(stretch.start, stretch.end), {MASTER: master, **each.optimizer.state.get(master, {})}
