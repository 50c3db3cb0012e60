"""Batches of short trajectories of different lengths, as trainers are given them."""

from __future__ import annotations

from typing import Any

from rollart.types import Group, GroupSpec, TrainBatch, Trajectory, Turn

GOOD, BAD = 5, 9


def member(made: Any, group: int, index: int, action: list[int], reward: float) -> Trajectory:
    """A trajectory of one turn; `made` says how likely its tokens were."""
    prompt = [2, 3, 4 + group]
    tokens = prompt + action
    logprobs = made.logprobs(tokens)[len(prompt) - 1 :]
    turns = [Turn(prompt, action, logprobs, [0] * len(action)), Turn([7] * (3 * index), [], [], [])]
    return Trajectory(f"t{group}.{index}", f"g{group}", "task", 0, turns, reward=reward, stop_reason="done")


def batch(made: Any, step: int = 1, groups: int = 4, reward: float = 1.0) -> TrainBatch:
    """Members that end with GOOD are rewarded, those that end with BAD are not; lengths differ."""
    made_groups = []
    for group in range(groups):
        actions = [[8] * index + [GOOD if index % 2 else BAD] for index in range(4)]
        members = [member(made, group, index, action, reward * (index % 2)) for index, action in enumerate(actions)]
        made_groups.append(Group(GroupSpec(group, "task", 0), members))
    return TrainBatch(step, 0, made_groups)
