"""Policy training on a learner: steps, mini-batches, the learning rate, and what becomes of losses that are not finite.

Invariants: the gradient of a mini-batch does not depend on how it is cut into micro-batches, nor on how these are
shared out among ranks (beyond rounding), as every token is divided by the number of trained tokens in all of it; a loss
or gradient that is not finite never reaches the weights. What this file leaves out: the model (`learner.py`), and how
weights are published and kept (the trainers).

Shape suffixes: B rows of a micro-batch, T positions.
"""

from __future__ import annotations

import logging
import math
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from torch import Tensor

from rollart.data.trainers.checkpoint import TrainerState
from rollart.data.trainers.learner import Adam, Learner
from rollart.data.trainers.supervised import warm_up
from rollart.errors import TrainError, boundary
from rollart.learn.batching import (
    MicroBatch,
    Sample,
    group_samples,
    micro_batches,
    padding_fraction,
    split_groups,
)
from rollart.learn.loss import PolicyTokens, metric_names, summed_loss
from rollart.sections import TrainConfig
from rollart.types import TrainBatch, TrainReport

log = logging.getLogger(__name__)

LEAST_RATE = 0.1
"""Share of the learning rate at which its decay ends."""

L = TypeVar("L", bound=Learner)


@dataclass
class _Update:
    """What one mini-batch did: sums over its trained tokens, and whether the weights moved."""

    tokens: int
    loss: float = 0.0
    grad_norm: float = 0.0
    finite: bool = True
    metrics: Counter[str] = field(default_factory=Counter)


class PolicyTrainer(Generic[L]):
    """What the trainers share. `temperature`: that of sampling, at which the loss takes log-probabilities.

    `seed`: order of the warm-up. Every rank of the learner calls every method with the same arguments.
    """

    def __init__(self, learner: L, options: TrainConfig, temperature: float, seed: int) -> None:
        self._learner: L = learner
        self._options = options
        self._temperature = temperature
        self._random = random.Random(seed)
        self._optimizer = learner.optimizer(self._adam())
        self._reference: Learner | None = None
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
        rate = self._learning_rate()
        groups = group_samples(batch.groups, self._options.advantage)
        parts = split_groups(groups, self._options.minibatches)
        plans = [micro_batches(part, self._options.micro_batch_tokens, self._learner.packs) for part in parts]
        collated = [[self._learner.collate(micro) for micro in self._learner.deal(plan)] for plan in plans]
        updates = self._run(collated, [sum(sample.num_trained for sample in part) for part in parts], rate)
        self._steps += 1
        self._count_nonfinite(updates)
        report = _report(batch.step, updates)
        samples = [sample for group in groups for sample in group]
        computed = self._learner.total({"inputs": sum(micro.num_computed for plan in collated for micro in plan)})
        report.metrics |= {
            "samples": len(samples),
            "empty_samples": sum(len(group.trajectories) for group in batch.groups) - len(samples),
            "padding_fraction": padding_fraction([micro for plan in plans for micro in plan]),
            "computed_fraction": computed["inputs"] / max(1, sum(sample.num_inputs for sample in samples)),
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
        losses = warm_up(self._learner, sequences, steps, learning_rate, batch_tokens, budget, self._random, progress)
        self._optimizer = self._learner.optimizer(self._adam())  # one may keep weights, which are those of before
        return losses

    def _adam(self) -> Adam:
        return Adam(self._options.beta1, self._options.beta2, self._options.weight_decay)

    def logprobs(self, tokens: Sequence[int]) -> list[float]:
        """As `Engine.logprobs`, at temperature 1; length len(tokens) - 1. Raises TrainError."""
        if len(tokens) < 2:
            return []
        ids, ones, zeros = list(tokens), [True] * len(tokens), [0.0] * len(tokens)
        with boundary(TrainError, f"log-probabilities of {len(ids)} tokens"):
            micro = self._learner.collate([Sample(ids, ones, zeros, zeros)])
            values: list[float] = self._learner.logprobs([micro], 1.0)[0][0].tolist()
        return values

    def _run(self, collated: list[list[MicroBatch]], tokens: list[int], rate: float) -> list[_Update]:
        # Until the first update the proximal policy is the current one, whose scores that update computes anyway.
        proximal = [
            self._learner.logprobs(plan, self._temperature) if index else None for index, plan in enumerate(collated)
        ]
        each = zip(collated, tokens, proximal, strict=True)
        return [self._update(plan, number, policy, rate) for plan, number, policy in each]

    def _update(
        self, batches: list[MicroBatch], num_tokens: int, proximal: list[Tensor] | None, rate: float
    ) -> _Update:
        """Accumulate the gradient of one mini-batch and apply it if it is finite."""
        reference = None if self._reference is None else self._reference.logprobs(batches, self._temperature)
        sums = dict.fromkeys(("loss", *metric_names(self._options)), 0.0)

        def loss(index: int, logprobs_BT: Tensor, entropy_BT: Tensor) -> Tensor:
            policy_BT = logprobs_BT.detach() if proximal is None else proximal[index]
            tokens = _policy_tokens(batches[index], logprobs_BT, policy_BT)
            value, metrics = summed_loss(tokens, entropy_BT, reference[index] if reference else None, self._options)
            for name, number in {"loss": float(value.detach()), **metrics}.items():
                sums[name] += number
            return value / num_tokens

        self._optimizer.zero()
        self._learner.accumulate(batches, self._temperature, self._options.entropy_coef > 0, loss)
        grad_norm = self._optimizer.clip(self._options.grad_clip)
        metrics = Counter(self._learner.total(sums))
        update = _Update(num_tokens, metrics.pop("loss"), grad_norm, metrics=metrics)
        update.finite = math.isfinite(update.loss) and math.isfinite(update.grad_norm)
        if update.finite:
            self._optimizer.step(rate)
        self._optimizer.zero()
        return update

    def _keep_reference(self) -> None:
        """Before step 1, and after any warm-up: the policy that the KL holds on to."""
        if self._options.kl_coef and self._reference is None:
            self._reference = self._learner.frozen()

    def _learning_rate(self) -> float:
        options = self._options
        rise = min(1.0, (self._steps + 1) / options.lr_warmup_steps) if options.lr_warmup_steps else 1.0
        fall = max(LEAST_RATE, 1.0 - self._steps / options.lr_decay_steps) if options.lr_decay_steps else 1.0
        return options.learning_rate * min(rise, fall)

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

    # ---------------------------------------------------------------------------------------------------------- state
    def _state(self) -> TrainerState:
        return TrainerState(self._steps, self._nonfinite_in_a_row, self._random.getstate())

    def _set_state(self, state: TrainerState) -> None:
        self._random.setstate(state.random_state)
        self._steps, self._nonfinite_in_a_row = state.steps, state.nonfinite_in_a_row


def _policy_tokens(micro: MicroBatch, logprobs_BT: Tensor, proximal_BT: Tensor) -> PolicyTokens:
    return PolicyTokens(
        logprobs_BT=logprobs_BT,
        proximal_BT=proximal_BT,
        behaviour_BT=micro.behaviour_BT,
        advantages_BT=micro.advantages_BT,
        mask_BT=micro.mask_BT,
    )


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
