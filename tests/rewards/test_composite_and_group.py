"""Rewards made of rewards: weighted, gated, and relative to a group."""

import random

import pytest

from rollart.errors import ConfigError, RewardError
from rollart.rewards.composite import Composite
from rollart.rewards.group import Length, Rank
from tests.rewards.parts import request

PARTS = "tests.rewards.parts"


def test_parts_are_summed_by_their_weights():
    reward = Composite(
        parts=[
            {"reward": f"{PARTS}:length", "weight": 0.5},
            {"reward": f"{PARTS}:Times", "options": {"factor": 2.0}},
            {"reward": f"{PARTS}:polite", "weight": -1},
        ]
    )
    assert reward(request("abcd")) == 0.5 * 4 + 2 * 4
    assert reward(request("please")) == 0.5 * 6 + 2 * 6 - 1


def test_a_shut_gate_makes_the_reward_0_and_spares_the_later_parts():
    reward = Composite(parts=[{"reward": f"{PARTS}:polite", "gate": True}, {"reward": f"{PARTS}:broken"}])
    assert reward(request("give me")) == 0
    with pytest.raises(RewardError, match="broken"):
        reward(request("please give me"))


@pytest.mark.parametrize(("threshold", "expected"), [(4, 4.0), (5, 0.0), (-1, 4.0)])
def test_a_gate_opens_at_its_threshold(threshold, expected):
    reward = Composite(parts=[{"reward": f"{PARTS}:length", "gate": True, "threshold": threshold}])
    assert reward(request("abcd")) == expected


@pytest.mark.parametrize(
    ("part", "complaint"),
    [
        ({"reward": f"{PARTS}:broken", "name": "style"}, "part 'style': KeyError: 'nothing here'"),
        ({"reward": f"{PARTS}:nothing"}, "part 'tests.rewards.parts:nothing' returned None"),
        ({"reward": f"{PARTS}:Times", "options": {"factor": 1e308}}, "returned inf"),
    ],
)
def test_a_fault_names_its_part(part, complaint):
    with pytest.raises(RewardError, match=complaint):
        Composite(parts=[part])(request("x" * 10))


@pytest.mark.parametrize(
    ("part", "complaint"),
    [
        ({"reward": f"{PARTS}:length", "wieght": 2}, r"parts\[0\].wieght: unknown key; did you mean 'weight'"),
        ({"reward": f"{PARTS}:length", "weight": "much"}, r"parts\[0\].weight: expected a number"),
        ({"reward": f"{PARTS}:size"}, r"parts\[0\].reward: .* has no 'size'"),
        ({"reward": f"{PARTS}:length", "options": {"a": 1}}, "takes none; write a class"),
        ({"reward": f"{PARTS}:Times", "options": {"faktor": 1}}, "options.faktor: unknown option"),
        ({"reward": f"{PARTS}:length", "threshold": 1}, "only a gate has one"),
        ({"weight": 1}, r"parts\[0\].reward: missing"),
        ("length", "expected a table"),
    ],
)
def test_a_part_that_cannot_work_is_refused_when_it_is_built(part, complaint):
    with pytest.raises(ConfigError, match=complaint):
        Composite(parts=[part])


def test_no_parts_are_refused():
    with pytest.raises(ConfigError, match="expected a list"):
        Composite(parts=[])


def test_ranks_go_from_0_to_1_with_ties_averaged():
    rank = Rank(base={"reward": f"{PARTS}:length"})
    assert rank([request("a" * n) for n in (7, 3, 5, 3, 9)]) == [0.75, 0.125, 0.5, 0.125, 1.0]
    assert rank([request("a")] * 4) == [0.5] * 4
    assert rank([request("a")]) == [0.5]


def test_ranks_do_not_depend_on_the_order_of_the_members():
    rank = Rank(base={"reward": f"{PARTS}:length"})
    members = [request("a" * n) for n in (1, 1, 2, 5, 5, 5, 8)]
    scored = {len(each.responses[0]): value for each, value in zip(members, rank(members), strict=True)}
    random.Random(1).shuffle(members)
    assert rank(members) == [scored[len(each.responses[0])] for each in members]


def test_length_rewards_short_right_answers_and_never_wrong_ones():
    base = {"reward": f"{PARTS}:polite"}
    members = [request("please"), request("please".ljust(16)), request("x" * 6), request("x" * 11), request("x" * 16)]
    assert Length(base=base, weight=1.0)(members) == [1.5, 0.5, 0.0, 0.0, -0.5]
    assert Length(base=base)(members) == [1.25, 0.75, 0.0, 0.0, -0.25]
    assert Length(base=base)([request("please"), request("xxxxxx")]) == [1.0, 0.0]
