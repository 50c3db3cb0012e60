"""From scored groups to padded tensors: samples, mini-batches by group, micro-batches by padded token budget.

Invariant: every trained token of a batch lies in exactly one micro-batch, and no sample is ever split. All of it is
deterministic. What this file leaves out: how rows are packed (`packing`), and who computes which micro-batch.

Shape suffixes: B rows of a micro-batch, T positions fed to the model (the last token of a sample is only a target).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from msgspec import Struct
from torch import Tensor

from rollart.errors import TrainError
from rollart.learn.advantage import advantages
from rollart.learn.packing import Device, Packed, num_alike, num_distinct, pack, padded
from rollart.types import Group, Trajectory


class Sample(Struct, frozen=True):
    """One sequence to train on; all lists run along `tokens`, which ends with the last trained token.

    `mask`: True where the token is trained. `behaviour_logprobs`: of the policy that generated it, 0 elsewhere.
    `advantages`: the weight of the token; the same for all tokens of a trajectory.
    """

    tokens: list[int]
    mask: list[bool]
    behaviour_logprobs: list[float]
    advantages: list[float]

    @property
    def num_inputs(self) -> int:
        """Positions fed to the model."""
        return len(self.tokens) - 1

    @property
    def num_trained(self) -> int:
        """Tokens that carry a loss."""
        return sum(self.mask)


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """Right-padded tensors of one forward pass. At [b, t] everything but `tokens_BT` speaks of token t + 1 of row b.

    `packed`: the same tokens in less room, where that pays.
    """

    tokens_BT: Tensor
    targets_BT: Tensor
    mask_BT: Tensor
    behaviour_BT: Tensor
    advantages_BT: Tensor
    packed: Packed | None = None

    @property
    def num_computed(self) -> int:
        """Positions that the model is fed."""
        return (self.tokens_BT if self.packed is None else self.packed.tokens_N).numel()


# ------------------------------------------------------------------------------------------------------------ samples
def group_samples(groups: Sequence[Group], advantage: str) -> list[list[Sample]]:
    """The samples of each group, with the advantages of `learn.advantage` under that name.

    A trajectory without a generated token gives no sample, but its reward counts. Raises TrainError, RewardError.
    """
    rewards = [[trajectory.reward for trajectory in group.trajectories] for group in groups]
    scored = zip(groups, advantages(advantage, rewards), strict=True)
    return [_samples(group, values) for group, values in scored]


def trajectory_sample(trajectory: Trajectory, advantage: float) -> Sample | None:
    """A trajectory as a sample, or None when it has no trained token. Raises TrainError when its lists disagree."""
    tokens, mask, logprobs = trajectory.tokens(), trajectory.loss_mask(), trajectory.behaviour_logprobs()
    if len(logprobs) != len(tokens):
        raise TrainError(
            f"trajectory {trajectory.trajectory_id}: {trajectory.num_generated_tokens} generated tokens, but "
            f"{sum(len(turn.logprobs) for turn in trajectory.turns)} log-probabilities; the engine must return one each"
        )
    return cut_sample(Sample(tokens, mask, logprobs, [advantage] * len(tokens)))


def cut_sample(sample: Sample) -> Sample | None:
    """Without what follows the last trained token, as nothing there can matter; None when no token is trained."""
    if not any(sample.mask):
        return None
    if sample.mask[0]:
        raise TrainError("the first token of a sequence cannot be trained, as nothing precedes it; give it a prompt")
    end = len(sample.mask) - sample.mask[::-1].index(True)
    return Sample(sample.tokens[:end], sample.mask[:end], sample.behaviour_logprobs[:end], sample.advantages[:end])


def _samples(group: Group, values: list[float]) -> list[Sample]:
    pairs = zip(group.trajectories, values, strict=True)
    return [sample for pair in pairs if (sample := trajectory_sample(*pair)) is not None]


# ------------------------------------------------------------------------------------------------------------ batches
SIMILAR = 0.75
"""A row at least this long, against the longest of its batch, is never mostly padding."""
PACKED = 0.8
"""Rows are packed where that leaves at most this share of their positions, as gathering them has its price."""


def split_groups(groups: Sequence[list[Sample]], num_minibatches: int) -> list[list[Sample]]:
    """Mini-batches of whole groups, dealt out in turn so that each holds early and late ones; empty ones left out."""
    parts = [groups[start::num_minibatches] for start in range(num_minibatches)]
    flat = [[sample for group in part for sample in group] for part in parts]
    return [samples for samples in flat if samples]


def micro_batches(samples: Sequence[Sample], budget_tokens: int, packs: bool = False) -> list[list[Sample]]:
    """Rows of similar length, longest first, with rows x longest <= budget; a longer sample stands alone.

    A batch that is worth its fixed cost already (an eighth of the budget) takes no row that would be mostly padding.
    `packs`: rows that mostly begin alike stay together, whatever their length, as packing saves the most on them.
    """
    batches: list[list[Sample]] = []
    longest = 0
    families = _families(samples) if packs else [[sample] for sample in samples]
    for family in sorted(families, key=lambda family: -max(sample.num_inputs for sample in family)):
        for index, sample in enumerate(family):
            longest = max(longest, sample.num_inputs)
            if batches and _fits(len(batches[-1]), longest, sample, budget_tokens, alike=index > 0):
                batches[-1].append(sample)
            else:
                batches.append([sample])
                longest = sample.num_inputs
    return batches


def _fits(num_rows: int, longest: int, sample: Sample, budget_tokens: int, alike: bool) -> bool:
    if (num_rows + 1) * longest > budget_tokens:
        return False
    return alike or sample.num_inputs >= SIMILAR * longest or num_rows * longest < budget_tokens / 8


def _families(samples: Sequence[Sample]) -> list[list[Sample]]:
    """Ordered by their tokens, and cut before each sample that shares less than half of them with the one before."""
    families: list[list[Sample]] = []
    before: list[int] = []
    for sample in sorted(samples, key=lambda sample: sample.tokens):
        if 2 * num_alike(before, sample.tokens) < len(sample.tokens):
            families.append([])
        families[-1].append(sample)
        before = sample.tokens
    return families


def deal(batches: Sequence[list[Sample]], num_ranks: int) -> list[list[list[Sample]]]:
    """The micro-batches of each rank, as many for every rank, as ranks that compute one wait for each other.

    Neighbours, which are of similar length, are computed at the same time. Those that are left over are cut by rows; a
    rank for which there are no rows gets one token that is not trained.
    """
    num_even = len(batches) // num_ranks * num_ranks
    dealt = [*batches[:num_even], *_evened(list(batches[num_even:]), num_ranks)]
    return [dealt[rank::num_ranks] for rank in range(num_ranks)]


def _evened(batches: list[list[Sample]], number: int) -> list[list[Sample]]:
    """`number` of batches with the same rows, or none where there are none."""
    if not batches:
        return []
    idle = Sample(batches[0][0].tokens[:2], [False] * 2, [0.0] * 2, [0.0] * 2)
    while len(batches) < number and any(len(batch) > 1 for batch in batches):
        batches.sort(key=lambda batch: (len(batch) > 1, len(batch) * max(each.num_inputs for each in batch)))
        largest = batches.pop()
        batches += [largest[: len(largest) // 2], largest[len(largest) // 2 :]]
    return batches + [[idle]] * (number - len(batches))


def padding_fraction(batches: Sequence[Sequence[Sample]]) -> float:
    """Share of the positions in these micro-batches that are padding."""
    fed = sum(len(batch) * max(sample.num_inputs for sample in batch) for batch in batches)
    used = sum(sample.num_inputs for batch in batches for sample in batch)
    return 1 - used / fed if fed else 0.0


def collate(samples: Sequence[Sample], device: Device = "cpu", packs: bool = False) -> MicroBatch:
    """Tensors of one micro-batch. Padding is on the right, so that causal attention needs no mask.

    `packs`: the model takes packed rows; whether they pay is decided here.
    """
    rows = [sample.tokens[:-1] for sample in samples]
    tokens_BT = padded(rows, torch.long, device)
    pays = packs and num_distinct(rows) <= PACKED * tokens_BT.numel()
    return MicroBatch(
        tokens_BT=tokens_BT,
        targets_BT=padded([sample.tokens[1:] for sample in samples], torch.long, device),
        mask_BT=padded([sample.mask[1:] for sample in samples], torch.bool, device),
        behaviour_BT=padded([sample.behaviour_logprobs[1:] for sample in samples], torch.float32, device),
        advantages_BT=padded([sample.advantages[1:] for sample in samples], torch.float32, device),
        packed=pack(rows, device) if pays else None,
    )
