"""Samples, mini-batches and micro-batches."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rollart.errors import TrainError
from rollart.learn.batching import (
    Sample,
    collate,
    cut_sample,
    deal,
    group_samples,
    micro_batches,
    padding_fraction,
    split_groups,
    trajectory_sample,
)
from rollart.types import Group, GroupSpec, Trajectory, Turn


def turn(observation, action):
    return Turn(observation, action, [-float(token) for token in action], [0] * len(action))


def trajectory(*turns, reward=0.0):
    return Trajectory("t0", "g0", "task", 0, list(turns), reward=reward, stop_reason="done")


def sample(num_inputs, trained=1):
    count = num_inputs + 1
    return Sample(
        list(range(count)), [False] * (count - trained) + [True] * trained, [0.0] * count, [float(num_inputs)] * count
    )


def test_a_trajectory_becomes_one_sample_that_trains_exactly_its_generated_tokens():
    made = trajectory_sample(trajectory(turn([1, 2], [3]), turn([4], [5, 6])), advantage=0.5)
    assert made.tokens == [1, 2, 3, 4, 5, 6]
    assert made.mask == [False, False, True, False, True, True]
    assert made.behaviour_logprobs == [0, 0, -3, 0, -5, -6]
    assert made.advantages == [0.5] * 6


def test_what_follows_the_last_trained_token_is_cut():
    made = trajectory_sample(trajectory(turn([1, 2], [3]), turn([4, 5, 6], [])), advantage=1.0)
    assert (made.tokens, made.num_inputs, made.num_trained) == ([1, 2, 3], 2, 1)


def test_a_trajectory_without_generated_tokens_gives_no_sample_but_its_reward_counts():
    group = Group(
        GroupSpec(0, "task", 0), [trajectory(turn([1], [2]), reward=1.0), trajectory(turn([1], []), reward=0.0)]
    )
    (samples,) = group_samples([group], "rloo")
    assert [made.advantages[0] for made in samples] == [1.0]


def test_a_trained_first_token_is_refused():
    with pytest.raises(TrainError, match="nothing precedes it"):
        cut_sample(Sample([1, 2], [True, True], [0.0, 0.0], [1.0, 1.0]))


def test_a_missing_logprob_is_refused_with_the_trajectory():
    broken = trajectory(Turn([1], [2, 3], [-1.0], [0, 0]))
    with pytest.raises(TrainError, match="trajectory t0: 2 generated tokens, but 1 log-prob"):
        trajectory_sample(broken, 0.0)


def test_minibatches_hold_whole_groups_and_every_group_once():
    groups = [[sample(length)] * 2 for length in (2, 3, 4, 5, 6)]
    parts = split_groups(groups, 2)
    assert [[made.num_inputs for made in part] for part in parts] == [[2, 2, 4, 4, 6, 6], [3, 3, 5, 5]]


def test_minibatches_without_samples_are_left_out():
    assert split_groups([[sample(2)], []], 2) == [[sample(2)]]


def test_a_sample_longer_than_the_budget_stands_alone():
    plan = micro_batches([sample(3), sample(50), sample(4)], budget_tokens=10)
    assert [[made.num_inputs for made in batch] for batch in plan] == [[50], [4, 3]]


def test_padding_fraction_counts_padded_positions():
    assert padding_fraction([[sample(4), sample(2)], [sample(4)]]) == pytest.approx(2 / 12)
    assert padding_fraction([]) == 0


@given(lengths=st.lists(st.integers(1, 60), max_size=30), budget=st.integers(1, 200), packs=st.booleans())
def test_every_sample_lies_in_one_microbatch_within_the_budget(lengths, budget, packs):
    samples = [sample(length) for length in lengths]
    plan = micro_batches(samples, budget, packs)
    assert sorted(made.num_inputs for batch in plan for made in batch) == sorted(lengths)
    for batch in plan:
        padded = len(batch) * max(made.num_inputs for made in batch)
        assert padded <= budget or len(batch) == 1
    assert micro_batches(samples, budget, packs) == plan


def test_collated_rows_align_each_target_with_the_position_that_predicts_it():
    long = Sample([5, 6, 7, 8], [False, True, False, True], [0.0, -1.0, 0.0, -2.0], [0.0, 3.0, 0.0, 4.0])
    short = Sample([1, 2], [False, True], [0.0, -3.0], [9.0, 9.0])
    micro = collate([long, short])
    assert micro.tokens_BT.tolist() == [[5, 6, 7], [1, 0, 0]]
    assert micro.targets_BT.tolist() == [[6, 7, 8], [2, 0, 0]]
    assert micro.mask_BT.tolist() == [[True, False, True], [True, False, False]]
    assert micro.behaviour_BT.tolist() == [[-1, 0, -2], [-3, 0, 0]]
    assert micro.advantages_BT.tolist() == [[3, 0, 4], [9, 0, 0]]
    assert micro.mask_BT.dtype == torch.bool


def test_short_rows_are_not_padded_to_the_length_of_much_longer_ones():
    long, short = [sample(200) for _ in range(8)], [sample(20) for _ in range(8)]
    batches = micro_batches(long + short, 4000)
    assert sorted(len(batch) for batch in batches) == [8, 8]
    assert padding_fraction(batches) == 0
    few = micro_batches([sample(200), *short], 4000)  # one long row alone is not worth a pass of its own
    assert [len(batch) for batch in few] == [3, 6]


def member(group, length, shared=20):
    """Begins like the others of its group, and not like any other group."""
    tokens = [group] * shared + [100 + length] * length
    return Sample(tokens, [False] * shared + [True] * length, [0.0] * len(tokens), [1.0] * len(tokens))


def test_where_rows_are_packed_those_that_begin_alike_stay_together():
    samples = [member(group, length) for length in (2, 6, 4, 8) for group in range(4)]
    budget = 4 * 27
    apart = micro_batches(samples, budget)
    together = micro_batches(samples, budget, packs=True)
    assert all(len({made.tokens[0] for made in batch}) == 4 for batch in apart)
    assert [{made.tokens[0] for made in batch} for batch in together] == [{0}, {1}, {2}, {3}]


def test_where_nothing_begins_alike_packing_changes_no_plan():
    samples = [
        Sample([index, *range(length)], [False] + [True] * length, [0.0] * (length + 1), [1.0] * (length + 1))
        for index, length in enumerate((5, 50, 7, 30, 6, 40, 55, 33))
    ]
    assert micro_batches(samples, 120, packs=True) == micro_batches(samples, 120)


def test_rows_are_packed_only_where_that_saves_positions():
    group = [member(0, length) for length in (3, 4, 5)]
    packed = collate(group, packs=True)
    assert packed.num_computed == 20 + 2 + 3 + 4
    assert collate(group).num_computed == 3 * 24
    assert torch.equal(packed.tokens_BT, collate(group).tokens_BT)
    strangers = [member(index, 5, shared=3) for index in range(4)]
    assert collate(strangers, packs=True).packed is None


LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=30)


@given(LENGTHS, st.integers(1, 8), st.sampled_from([1, 20, 100, 10_000]))
def test_every_rank_has_as_many_micro_batches_and_every_trained_token_is_dealt_once(lengths, num_ranks, budget):
    samples = [sample(length) for length in lengths]
    shares = deal(micro_batches(samples, budget), num_ranks)
    assert len(shares) == num_ranks
    assert len({len(share) for share in shares}) == 1
    dealt = [each for share in shares for micro in share for each in micro]
    trained = sorted(each.num_inputs for each in dealt if each.num_trained)
    assert trained == sorted(lengths)
    assert all(each.num_inputs == 1 for each in dealt if not each.num_trained)
    assert all(micro for share in shares for micro in share)


def test_one_micro_batch_is_cut_by_rows_before_a_rank_idles():
    shares = deal([[sample(4) for _ in range(6)]], 4)
    assert sorted(len(micro) for (micro,) in shares) == [1, 1, 2, 2]
    assert all(each.num_trained for (micro,) in shares for each in micro)
    idle = deal([[sample(4)]], 3)
    assert sorted(micro[0].num_trained for (micro,) in idle) == [0, 0, 1]
    assert deal([], 2) == [[], []]
