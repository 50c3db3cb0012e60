import random

import gymnasium
import pytest
from gymnasium.envs.toy_text.frozen_lake import generate_random_map

from rollart.tasks import held_out
from rollart.tasks.frozenlake import TASK, WORDS, FrozenLake, FrozenLakeOptions


@pytest.mark.parametrize("slippery", [False, True])
@pytest.mark.parametrize("seed", [0, 7, 2**31 + 5])
def test_agrees_with_gymnasium_step_by_step(slippery, seed):
    options = FrozenLakeOptions(size=5, slippery=slippery)
    ours = FrozenLake(options)
    drawn = held_out.draw(seed, lambda each: generate_random_map(5, 0.8, each), " ".join)
    theirs = gymnasium.make("FrozenLake-v1", desc=drawn, is_slippery=slippery)
    observation, _ = ours.reset(seed)
    state, _ = theirs.reset(seed=seed)
    rng = random.Random(seed)
    for _ in range(60):
        assert divmod(int(state), 5) == _player(observation)
        number = rng.randrange(4)
        observation, *outcome, _ = ours.step(WORDS[number])
        state, *expected, _ = theirs.step(number)
        assert outcome == expected
        if expected[1]:
            observation, _ = ours.reset(seed)
            state, _ = theirs.reset(seed=seed)


def test_the_observation_is_the_grid_with_the_player():
    observation, _ = FrozenLake(FrozenLakeOptions(size=4)).reset(3)
    lines = observation.split("\n")
    assert lines[0].startswith("P ")
    assert lines[-1].endswith(" G")
    assert len(lines) == 4
    assert {cell for line in lines for cell in line.split(" ")} <= set("PFHG")


def test_the_start_shows_again_once_the_player_left_it():
    env = FrozenLake(FrozenLakeOptions(frozen_probability=1.0))
    env.reset(0)
    assert env.step("right")[0].startswith("S P F F\n")


def test_the_near_view_says_where_the_goal_lies_and_which_neighbours_are_safe():
    env = FrozenLake(FrozenLakeOptions(size=2, frozen_probability=1.0, view="both"))
    assert env.reset(0)[0] == "P F\nF G\ngoal down right\nfrozen down right"
    near = FrozenLake(FrozenLakeOptions(size=2, frozen_probability=1.0, view="near"))
    assert near.reset(0)[0] == "goal down right\nfrozen down right"
    assert env.step("down")[0] == "S F\nP G\ngoal right\nfrozen up right"


def test_start_and_goal_lie_anywhere_and_a_way_joins_them():
    env = FrozenLake(FrozenLakeOptions(anywhere=True, frozen_probability=0.5, view="both"))
    maps = set()
    for seed in range(200):
        lines = env.reset(seed)[0].split("\n")
        grid, towards = lines[:4], lines[4].split(" ")[1:]
        cells = {
            cell: (row, line.split(" ").index(cell)) for row, line in enumerate(grid) for cell in "PG" if cell in line
        }
        (row, column), (goal_row, goal_column) = cells["P"], cells["G"]
        assert ("up" in towards, "down" in towards) == (goal_row < row, goal_row > row)
        assert ("left" in towards, "right" in towards) == (goal_column < column, goal_column > column)
        assert _way_exists(env, seed)
        maps.add("\n".join(grid))
    assert len(maps) > 190
    assert env.reset(5) == FrozenLake(FrozenLakeOptions(anywhere=True, frozen_probability=0.5, view="both")).reset(5)


def _way_exists(env, seed):
    """By play alone: every sequence of moves that does not end in a hole, breadth first over what is seen."""
    seen, queue = set(), [[]]
    while queue:
        way = queue.pop(0)
        for word in WORDS:
            env.reset(seed)
            for each in way:
                env.step(each)
            observation, reward, terminated, _, _ = env.step(word)
            if reward > 0:
                return True
            if not terminated and observation not in seen:
                seen.add(observation)
                queue.append([*way, word])
    return False


def test_the_goal_ends_with_reward_one_and_a_hole_with_none():
    env = FrozenLake(FrozenLakeOptions(size=2, frozen_probability=1.0))
    env.reset(0)
    env.step("down")
    assert env.step("right")[1:4] == (1.0, True, False)
    env = FrozenLake(FrozenLakeOptions(size=4, frozen_probability=0.5))
    seed = next(seed for seed in range(99) if env.reset(seed)[0].startswith("P H"))
    env.reset(seed)
    assert env.step("right")[1:4] == (0.0, True, False)


def test_the_first_direction_in_the_text_counts():
    env = FrozenLake(FrozenLakeOptions(frozen_probability=1.0))
    env.reset(0)
    assert _player(env.step("upward? No: Down, then right")[0]) == (1, 0)


def test_an_exact_answer_is_one_direction_and_nothing_else():
    env = FrozenLake(FrozenLakeOptions(frozen_probability=1.0, exact=True))
    env.reset(0)
    assert _player(env.step(" Down\n")[0]) == (1, 0)
    for text in ("down down", "downdown", "go down", ""):
        observation, _, _, _, info = env.step(text)
        assert info == {"invalid": True}
        assert _player(observation.removeprefix("Invalid action.\n")) == (1, 0)


def test_a_text_without_direction_changes_nothing_and_says_so():
    env = FrozenLake(FrozenLakeOptions(invalid_penalty=0.25))
    before, _ = env.reset(1)
    assert env.step("jump") == (f"Invalid action.\n{before}", -0.25, False, False, {"invalid": True})
    assert env.step("")[0] == f"Invalid action.\n{before}"


def test_a_text_without_direction_can_end_the_episode():
    env = FrozenLake(FrozenLakeOptions(invalid_ends=True, frozen_probability=1.0))
    env.reset(1)
    assert env.step("right")[2] is False
    _, reward, terminated, truncated, _ = env.step("jump")
    assert (reward, terminated, truncated) == (0.0, True, False)


def test_equal_seeds_give_equal_episodes_and_different_seeds_different_maps():
    first, second = FrozenLake(), FrozenLake()
    assert first.reset(11) == second.reset(11) == first.reset(11)
    assert len({first.reset(seed)[0] for seed in range(50)}) > 30


def test_random_actions_are_the_four_words():
    rng = random.Random(0)
    assert {FrozenLake().sample_action(rng) for _ in range(100)} == {"up", "down", "left", "right"}


def _player(observation):
    lines = [line.split(" ") for line in observation.split("\n")]
    return next((row, line.index("P")) for row, line in enumerate(lines) if "P" in line)


def test_a_discount_pays_short_ways_more_and_every_arrival_is_a_success():
    for detour, steps in ([], 6), (["right", "left"], 8):
        env = FrozenLake(FrozenLakeOptions(frozen_probability=1.0, discount=0.9))
        env.reset(0)
        for word in (*detour, *["right"] * 3, *["down"] * 3):
            _, reward, terminated, _, _ = env.step(word)
        assert terminated
        assert reward == pytest.approx(0.9 ** (steps - 1))
        assert reward >= TASK.success_reward
