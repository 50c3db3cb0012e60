"""Advantages against numbers worked out by hand."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollart.errors import ConfigError, RewardError, TrainError
from rollart.learn.advantage import ADVANTAGES, advantages


def test_grpo_is_the_distance_from_the_group_mean_in_standard_deviations():
    # mean 1/4, population std sqrt(3)/4
    got = advantages("grpo", [[1, 0, 0, 0]])
    assert got[0] == pytest.approx([math.sqrt(3), *[-1 / math.sqrt(3)] * 3], rel=1e-5)


def test_grpo_compares_each_group_only_with_itself():
    first, second = advantages("grpo", [[0, 2], [100, 102]])
    assert first == pytest.approx([-1, 1], rel=1e-5)
    assert second == pytest.approx(first)


def test_grpo_gives_exact_zeros_when_all_rewards_are_equal():
    assert advantages("grpo", [[0.1, 0.1, 0.1]])[0] == pytest.approx([0, 0, 0], abs=1e-9)


def test_rloo_subtracts_the_mean_of_the_others():
    assert advantages("rloo", [[1, 2, 6]]) == [[1 - 4, 2 - 3.5, 6 - 1.5]]


def test_rloo_refuses_a_group_of_one():
    with pytest.raises(TrainError, match="reinforce_pp"):
        advantages("rloo", [[1.0]])


def test_reinforce_pp_normalises_over_the_whole_batch():
    # all rewards 0 0 0 4: mean 1, population std sqrt(3)
    got = advantages("reinforce_pp", [[0, 0], [0], [4]])
    expected = [-1 / math.sqrt(3), 3 / math.sqrt(3)]
    assert got[0] == pytest.approx([expected[0]] * 2, rel=1e-5)
    assert got[1] == pytest.approx([expected[0]], rel=1e-5)
    assert got[2] == pytest.approx([expected[1]], rel=1e-5)


@pytest.mark.parametrize("name", list(ADVANTAGES))
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_rewards_that_are_not_finite_are_refused_with_their_place(name, bad):
    with pytest.raises(RewardError, match="member 1 of group 1"):
        advantages(name, [[1.0, 2.0], [0.0, bad]])


def test_an_unknown_name_is_answered_with_the_nearest_one():
    with pytest.raises(ConfigError, match="did you mean 'grpo'"):
        advantages("grop", [[1.0]])


@pytest.mark.parametrize("name", list(ADVANTAGES))
@given(rewards=st.lists(st.lists(st.floats(-1e3, 1e3), min_size=2, max_size=6), min_size=1, max_size=5))
def test_shape_is_kept_and_advantages_are_finite_and_sum_to_zero(name, rewards):
    got = advantages(name, rewards)
    assert [len(group) for group in got] == [len(group) for group in rewards]
    flat = [value for group in got for value in group]
    assert all(map(math.isfinite, flat))
    assert sum(flat) == pytest.approx(0, abs=1e-2)
