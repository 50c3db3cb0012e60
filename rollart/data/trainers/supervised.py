"""The supervised warm-up before step 1: next-token training on weighted sequences, as pre-training does at scale.

Invariant: its optimizer is its own and is dropped at the end, so that reinforcement learning starts with a fresh one.
What this file leaves out: where the sequences come from.

Shape suffixes: B rows of a micro-batch, T positions.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence

from torch import Tensor

from rollart.data.trainers.learner import Adam, Learner, Optimizer
from rollart.errors import TrainError
from rollart.learn.batching import Sample, cut_sample, micro_batches

ADAM = Adam(0.9, 0.95, fused=False)
GRAD_CLIP = 1.0
RAMP_FRACTION = 0.05
"""Share of the steps over which the learning rate rises, before it falls to zero along a cosine."""


def warm_up(
    learner: Learner,
    sequences: Sequence[tuple[list[int], list[float]]],
    steps: int,
    learning_rate: float,
    batch_tokens: int,
    micro_batch_tokens: int,
    order: random.Random,
    progress: Callable[[int, float], None],
) -> tuple[float, float]:
    """Minimise the weighted mean of -log p(token); returns the first and the last loss.

    `progress` hears (steps done, loss) after each step.

    `sequences`: (token ids, one weight per token; 0 = not trained). `batch_tokens`: tokens per step, at least one
    sequence. Raises TrainError for unusable sequences or a loss that is not finite.
    """
    samples = [sample for tokens, weights in sequences if (sample := weighted_sample(tokens, weights)) is not None]
    if steps < 1 or not samples:
        raise TrainError("the warm-up needs at least one step and one sequence with a token of weight above 0")
    optimizer = learner.optimizer(ADAM)
    batches = _batches(samples, batch_tokens, order)
    losses: list[float] = []
    for step in range(steps):
        plan = micro_batches(next(batches), micro_batch_tokens, learner.packs)
        losses.append(_step(learner, optimizer, plan, learning_rate * decay(step, steps)))
        progress(step + 1, losses[-1])
    return losses[0], losses[-1]


def decay(step: int, steps: int) -> float:
    """The factor on the learning rate: a short linear rise, then half a cosine towards 0."""
    ramp = max(1, round(steps * RAMP_FRACTION))
    if step < ramp:
        return (step + 1) / ramp
    return 0.5 * (1 + math.cos(math.pi * (step - ramp + 1) / (steps - ramp + 1)))


def weighted_sample(tokens: Sequence[int], weights: Sequence[float]) -> Sample | None:
    """A sequence as a sample whose weights stand where advantages do. The first token is never trained."""
    if len(tokens) != len(weights) or not all(math.isfinite(weight) and weight >= 0 for weight in weights):
        raise TrainError(
            f"warm-up sequence with {len(tokens)} tokens and {len(weights)} weights: "
            "give one finite weight of at least 0 for each token"
        )
    trained = [index > 0 and weight > 0 for index, weight in enumerate(weights)]
    return cut_sample(Sample(list(tokens), trained, [0.0] * len(tokens), list(weights)))


def _batches(samples: list[Sample], batch_tokens: int, order: random.Random) -> Iterator[list[Sample]]:
    """Endless batches, each sequence once per pass, in a new order in every pass."""
    batch: list[Sample] = []
    room = batch_tokens
    while True:
        for sample in order.sample(samples, len(samples)):
            if batch and len(sample.tokens) > room:
                yield batch
                batch, room = [], batch_tokens
            batch.append(sample)
            room -= len(sample.tokens)


def _step(learner: Learner, optimizer: Optimizer, plan: list[list[Sample]], learning_rate: float) -> float:
    total = sum(
        w for part in plan for sample in part for w, bit in zip(sample.advantages, sample.mask, strict=True) if bit
    )
    batches = [learner.collate(part) for part in learner.deal(plan)]
    sums = {"loss": 0.0}

    def loss(index: int, logprobs_BT: Tensor, _entropy_BT: Tensor) -> Tensor:
        value = -(batches[index].advantages_BT * logprobs_BT).sum() / total
        sums["loss"] += float(value.detach())
        return value

    optimizer.zero()
    learner.accumulate(batches, 1.0, False, loss)
    norm = optimizer.clip(GRAD_CLIP)
    loss_sum = learner.total(sums)["loss"]
    if not (math.isfinite(loss_sum) and math.isfinite(norm)):
        raise TrainError(f"warm-up loss {loss_sum}, gradient norm {norm}; lower model.warmup_learning_rate")
    optimizer.step(learning_rate)
    optimizer.zero()
    return loss_sum
