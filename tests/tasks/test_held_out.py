"""What evaluation sees was never seen in training."""

import pytest

from rollart.tasks.arithmetic import Arithmetic
from rollart.tasks.frozenlake import FrozenLake, FrozenLakeOptions
from rollart.tasks.held_out import draw, is_held_out
from rollart.tasks.sorting import Sorting, SortingOptions
from rollart.types import HELD_OUT


@pytest.mark.parametrize(
    "env", [FrozenLake(FrozenLakeOptions(size=3)), Sorting(SortingOptions(length=3, high=2)), Arithmetic()]
)
def test_no_content_of_evaluation_occurs_in_training(env):
    trained = {env.reset(seed)[0] for seed in range(300)}
    evaluated = {env.reset(HELD_OUT + seed)[0] for seed in range(100)}
    assert len(evaluated) > 1
    assert not trained & evaluated
    assert [env.reset(seed)[0] for seed in (3, HELD_OUT + 3)] == [env.reset(seed)[0] for seed in (3, HELD_OUT + 3)]


def test_a_family_too_small_for_two_sides_is_shared():
    (only,) = {draw(seed, lambda _: "same") for seed in (1, HELD_OUT)}
    assert only == "same"


def test_about_one_content_in_eight_is_held_out():
    assert 0.1 < sum(is_held_out(f"map {number}") for number in range(2000)) / 2000 < 0.15
