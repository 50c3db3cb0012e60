"""The one-process PyTorch trainer: any Hugging Face causal LM in float32, AdamW, gradient accumulation.

Invariants: the gradient of a mini-batch does not depend on how it is cut into micro-batches (beyond rounding); a loss
or gradient that is not finite never reaches the weights; save, load and go on gives the same bits as going on.
What this file leaves out: publishing weights (`data/training.py`), sharding, mixed precision.

Shape suffixes: B rows of a micro-batch, T positions.
"""

from __future__ import annotations

import copy
import logging
import math
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rollart.data.trainers import checkpoint
from rollart.data.trainers.scoring import Scorer, load_model
from rollart.data.trainers.supervised import warm_up
from rollart.errors import RunFolderError, TrainError, boundary
from rollart.learn.batching import (
    MicroBatch,
    Sample,
    group_samples,
    micro_batches,
    padding_fraction,
    split_groups,
)
from rollart.learn.loss import PolicyTokens, summed_loss
from rollart.sections import TrainConfig
from rollart.types import ParameterInfo, TrainBatch, TrainReport

log = logging.getLogger(__name__)

LEAST_RATE = 0.1
"""Share of the learning rate at which its decay ends."""


@dataclass
class _Update:
    """What one mini-batch did: sums over its trained tokens, and whether the weights moved."""

    loss: float = 0.0
    grad_norm: float = 0.0
    tokens: int = 0
    finite: bool = True
    metrics: Counter[str] = field(default_factory=Counter)


class EmbeddedTrainer:
    """Implements `protocols.Trainer`.

    `model_folder`: Hugging Face format. `temperature`: that of sampling; log-probabilities in the loss are taken at it.
    `seed`: order of the warm-up; `device`: what torch calls it. Raises ConfigError when the model cannot be loaded.
    """

    def __init__(
        self, model_folder: str, options: TrainConfig, temperature: float, seed: int, device: str = "cpu"
    ) -> None:
        self._model_folder = Path(model_folder)
        self._options = options
        self._temperature = temperature
        self._random = random.Random(seed)
        self._scorer = Scorer(load_model(model_folder, device))
        self._optimizer = make_optimizer(self._scorer.model, options)
        self._reference: Scorer | None = None
        self._steps = 0
        self._nonfinite_in_a_row = 0

    # ------------------------------------------------------------------------------------------------------- training
    def train_step(self, batch: TrainBatch) -> TrainReport:
        """One optimizer step per mini-batch.

        A mini-batch whose loss or gradient is not finite is left out; `skipped` says that none moved the weights.
        Raises TrainError after `max_nonfinite` steps in a row with such a mini-batch, or without any trained token;
        RewardError for a reward that is not finite.
        """
        started = time.perf_counter()
        self._keep_reference()
        rate = self._set_learning_rate()
        groups = group_samples(batch.groups, self._options.advantage)
        parts = split_groups(groups, self._options.minibatches)
        budget, packs = self._options.micro_batch_tokens, self._scorer.packs
        plans = [micro_batches(part, budget, packs) for part in parts]
        collated = [[self._scorer.collate(micro) for micro in plan] for plan in plans]
        updates = self._run(collated)
        self._steps += 1
        self._count_nonfinite(updates)
        report = _report(batch.step, updates)
        samples = sum(map(len, groups))
        num_inputs = sum(sample.num_inputs for group in groups for sample in group)
        report.metrics |= {
            "samples": samples,
            "empty_samples": sum(len(group.trajectories) for group in batch.groups) - samples,
            "padding_fraction": padding_fraction([micro for plan in plans for micro in plan]),
            "computed_fraction": sum(micro.num_computed for plan in collated for micro in plan) / max(1, num_inputs),
        }
        report.learning_rate, report.seconds = rate, time.perf_counter() - started
        return report

    def warmup(
        self,
        sequences: Sequence[tuple[list[int], list[float]]],
        steps: int,
        learning_rate: float,
        batch_tokens: int,
        progress: Callable[[int, float], None],
    ) -> tuple[float, float]:
        """Supervised next-token steps on (token ids, weight per token) before step 1; the first and the last loss.

        Raises TrainError. See `supervised.warm_up`.
        """
        self._reference = None
        budget = self._options.micro_batch_tokens
        return warm_up(self._scorer, sequences, steps, learning_rate, batch_tokens, budget, self._random, progress)

    def _run(self, collated: list[list[MicroBatch]]) -> list[_Update]:
        # Until the first update the proximal policy is the current one, whose scores that update computes anyway.
        proximal = [[self._proximal(micro) for micro in plan] if index else None for index, plan in enumerate(collated)]
        return [self._update(plan, policy) for plan, policy in zip(collated, proximal, strict=True)]

    @torch.no_grad()
    def _proximal(self, micro: MicroBatch) -> Tensor:
        return self._scorer.score(micro, self._temperature)[0]

    def _update(self, batches: list[MicroBatch], proximal: list[Tensor] | None) -> _Update:
        """Accumulate the gradient of one mini-batch and apply it if it is finite."""
        update = _Update(tokens=sum(int(micro.mask_BT.sum()) for micro in batches))
        self._optimizer.zero_grad(set_to_none=True)
        for index, micro in enumerate(batches):
            loss, metrics = self._micro_loss(micro, None if proximal is None else proximal[index])
            (loss / update.tokens).backward()
            update.loss += float(loss.detach())
            update.metrics.update(metrics)
        norm = torch.nn.utils.clip_grad_norm_(self._scorer.model.parameters(), self._options.grad_clip)
        update.grad_norm = float(norm)
        update.finite = math.isfinite(update.loss) and math.isfinite(update.grad_norm)
        if update.finite:
            self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return update

    def _micro_loss(self, micro: MicroBatch, proximal_BT: Tensor | None) -> tuple[Tensor, dict[str, float]]:
        options = self._options
        logprobs_BT, entropy_BT = self._scorer.score(micro, self._temperature, options.entropy_coef > 0)
        tokens = PolicyTokens(
            logprobs_BT=logprobs_BT,
            proximal_BT=logprobs_BT.detach() if proximal_BT is None else proximal_BT,
            behaviour_BT=micro.behaviour_BT,
            advantages_BT=micro.advantages_BT,
            mask_BT=micro.mask_BT,
        )
        return summed_loss(tokens, entropy_BT, self._reference_logprobs(micro), options)

    @torch.no_grad()
    def _reference_logprobs(self, micro: MicroBatch) -> Tensor | None:
        return None if self._reference is None else self._reference.score(micro, self._temperature)[0]

    def _keep_reference(self) -> None:
        """Before step 1, and after any warm-up: the policy that the KL holds on to."""
        if self._options.kl_coef and self._reference is None:
            self._reference = self._frozen_copy()

    def _frozen_copy(self) -> Scorer:
        return Scorer(copy.deepcopy(self._scorer.model).requires_grad_(False))

    def _set_learning_rate(self) -> float:
        options = self._options
        rise = min(1.0, (self._steps + 1) / options.lr_warmup_steps) if options.lr_warmup_steps else 1.0
        fall = max(LEAST_RATE, 1.0 - self._steps / options.lr_decay_steps) if options.lr_decay_steps else 1.0
        rate = options.learning_rate * min(rise, fall)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        return rate

    def _count_nonfinite(self, updates: list[_Update]) -> None:
        bad = [update for update in updates if not update.finite]
        if updates and not bad:
            self._nonfinite_in_a_row = 0
            return
        self._nonfinite_in_a_row += 1
        cause = f"loss {bad[0].loss}, gradient norm {bad[0].grad_norm}" if bad else "no trained token in the batch"
        log.warning("train step left out (%s); %d in a row", cause, self._nonfinite_in_a_row)
        if self._nonfinite_in_a_row >= self._options.max_nonfinite:
            raise TrainError(
                f"{self._nonfinite_in_a_row} train steps in a row could not be applied (last: {cause}); the weights "
                "are those before them. Try a lower train.learning_rate or train.grad_clip, look for extreme rewards, "
                "or resume from an earlier checkpoint"
                + ("" if bad else "; generations are empty: check the stop tokens and the token limits")
            )

    # -------------------------------------------------------------------------------------------------------- weights
    @torch.no_grad()
    def logprobs(self, tokens: Sequence[int]) -> list[float]:
        """As `Engine.logprobs`, at temperature 1; length len(tokens) - 1. Raises TrainError."""
        if len(tokens) < 2:
            return []
        ids, ones, zeros = list(tokens), [True] * len(tokens), [0.0] * len(tokens)
        with boundary(TrainError, f"log-probabilities of {len(ids)} tokens"):
            micro = self._scorer.collate([Sample(ids, ones, zeros, zeros)])
            values: list[float] = self._scorer.score(micro, 1.0)[0][0].tolist()
        return values

    def parameters(self) -> list[ParameterInfo]:
        """Names, shapes and dtypes (`float32`) of what `tensors` yields, in its order."""
        return [
            ParameterInfo(name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
            for name, tensor in unique_tensors(self._scorer.model)
        ]

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """The current weights on CPU, one at a time; a tied weight appears once, under its first name.

        They may be views of the live weights: use each before the next train step.
        """
        for name, tensor in unique_tensors(self._scorer.model):
            yield name, tensor.detach().cpu().contiguous()

    # --------------------------------------------------------------------------------------------------- save and load
    def save(self, folder: str) -> None:
        """Write a checkpoint into an empty or new folder. Raises RunFolderError."""
        tensors = {f"optimizer/{name}": tensor for name, tensor in optimizer_tensors(self._scorer, self._optimizer)}
        tensors["random/torch"] = torch.get_rng_state()
        if self._reference is not None:
            tensors |= {f"reference/{name}": tensor for name, tensor in unique_tensors(self._reference.model)}
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        state = checkpoint.TrainerState(self._steps, self._nonfinite_in_a_row, self._random.getstate())
        checkpoint.write(folder, self._scorer.model, self._model_folder, tensors, state)

    def load(self, folder: str) -> None:
        """Go on from a checkpoint, exactly. Raises RunFolderError when it is half-written or of another model."""
        tensors, state = checkpoint.read(folder)
        reference = _under("reference/", tensors)
        if self._options.kl_coef and state.steps and not reference:
            raise RunFolderError(
                f"checkpoint {folder} was made with train.kl_coef = 0 and holds no reference model; "
                "resume with train.kl_coef = 0"
            )
        saved = load_model(folder, "cpu")
        with boundary(RunFolderError, f"checkpoint {folder} is of another model than {self._model_folder}"):
            self._scorer.model.load_state_dict(saved.state_dict())
        set_optimizer_tensors(self._scorer, self._optimizer, _under("optimizer/", tensors))
        torch.set_rng_state(tensors["random/torch"])
        self._random.setstate(state.random_state)
        self._steps, self._nonfinite_in_a_row = state.steps, state.nonfinite_in_a_row
        self._reference = None
        if self._options.kl_coef and reference:
            self._reference = self._frozen_copy()
            for name, tensor in unique_tensors(self._reference.model):
                tensor.copy_(reference[name])


def make_optimizer(model: Any, options: TrainConfig) -> torch.optim.AdamW:
    """AdamW over all weights; vectors (norms, biases) are not decayed."""
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    groups: list[dict[str, Any]] = [
        {"params": [weight for weight in weights if weight.ndim > 1], "weight_decay": options.weight_decay},
        {"params": [weight for weight in weights if weight.ndim <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=options.learning_rate,
        betas=(options.beta1, options.beta2),
        fused=True,
    )


def unique_tensors(model: Any) -> Iterator[tuple[str, Tensor]]:
    """The entries of the state dict, each storage once, under its first name, as Hugging Face saves them."""
    seen: set[int] = set()
    for name, tensor in model.state_dict().items():
        if tensor.data_ptr() not in seen:
            seen.add(tensor.data_ptr())
            yield name, tensor


def optimizer_tensors(scorer: Scorer, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, Tensor]]:
    """(parameter/key, tensor) of the optimizer's state."""
    for name, weight in scorer.model.named_parameters():
        for key, value in optimizer.state.get(weight, {}).items():
            yield f"{name}/{key}", value


def set_optimizer_tensors(scorer: Scorer, optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor]) -> None:
    """The inverse of `optimizer_tensors`."""
    optimizer.state.clear()
    weights = dict(scorer.model.named_parameters())
    for path, value in tensors.items():
        name, _, key = path.rpartition("/")
        place = "cpu" if key == "step" and scorer.device.type == "cpu" else scorer.device
        optimizer.state[weights[name]][key] = value.to(place)


def _under(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def _report(step: int, updates: list[_Update]) -> TrainReport:
    """Means over the trained tokens of the mini-batches that were applied, or of all when none was."""
    applied = [update for update in updates if update.finite]
    counted = applied or updates
    tokens = sum(update.tokens for update in counted)
    sums: Counter[str] = Counter()
    for update in counted:
        sums.update(update.metrics)
    return TrainReport(
        step=step,
        loss=sum(update.loss for update in counted) / max(1, tokens),
        grad_norm=sum(update.grad_norm for update in counted) / max(1, len(counted)),
        learning_rate=0.0,
        trained_tokens=tokens,
        seconds=0.0,
        skipped=not applied,
        metrics={name: value / max(1, tokens) for name, value in sums.items()}
        | {"nonfinite_minibatches": float(len(updates) - len(applied))},
    )
