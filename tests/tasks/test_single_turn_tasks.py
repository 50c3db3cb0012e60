import random

import pytest

from rollart.rewards.rule import sorting
from rollart.tasks.arithmetic import Arithmetic, ArithmeticOptions
from rollart.tasks.sorting import Sorting, SortingOptions
from rollart.types import RewardRequest


def test_sorting_asks_for_as_many_numbers_as_configured():
    observation, _ = Sorting(SortingOptions(length=4, low=-3, high=-1)).reset(5)
    assert observation.startswith("Sort: ")
    numbers = [int(word) for word in observation.removeprefix("Sort: ").split(" ")]
    assert len(numbers) == 4
    assert set(numbers) <= {-3, -2, -1}


def test_sorting_ends_after_one_answer_and_leaves_the_score_to_the_reward():
    env = Sorting()
    env.reset(0)
    assert env.step("1 2 3")[1:4] == (0.0, True, False)


@pytest.mark.parametrize(
    ("answer", "score"),
    [
        ("1 2 3 4", 1.0),
        ("  1 2\n3 4 ", 1.0),
        ("1 2 4 3", 0.5),
        ("1 2 3", 0.75),
        ("1 2 3 4 4", 0.8),
        ("01 2 3 4", 0.75),
        ("Answer: 1 2 3 4", 0.0),
        ("", 0.0),
    ],
)
def test_sorting_scores_the_share_of_right_positions(answer, score):
    request = RewardRequest(task="sorting", seed=1, prompts=["Sort: 4 1 3 2"], responses=[answer])
    assert sorting(request) == pytest.approx(score)


def test_sorting_refuses_a_prompt_that_is_not_its_own():
    with pytest.raises(ValueError, match="no 'Sort"):
        sorting(RewardRequest(task="sorting", seed=1, prompts=["Walk"], responses=["1"]))


def test_the_sorted_prompt_always_scores_one_and_random_actions_have_its_form():
    env, rng = Sorting(), random.Random(3)
    for seed in range(20):
        prompt, _ = env.reset(seed)
        answer = " ".join(sorted(prompt.removeprefix("Sort: ").split()))
        assert sorting(RewardRequest(task="s", seed=seed, prompts=[prompt], responses=[answer])) == 1.0
        assert len(env.sample_action(rng).split()) == 6


@pytest.mark.parametrize("seed", range(20))
def test_arithmetic_rewards_the_right_integer_alone(seed):
    env = Arithmetic(ArithmeticOptions(num_terms=3, max_value=20))
    prompt, _ = env.reset(seed)
    result = _value(prompt)
    assert env.step(f" {result}\n")[1:4] == (1.0, True, False)
    assert env.step(str(result + 1))[1] == 0.0
    assert env.step(f"{result} or so")[1] == 0.0
    assert env.step("")[1] == 0.0


def test_arithmetic_repeats_itself_for_a_seed_and_samples_possible_results():
    env = Arithmetic(ArithmeticOptions(num_terms=2, max_value=3))
    assert env.reset(8) == Arithmetic(ArithmeticOptions(num_terms=2, max_value=3)).reset(8)
    rng = random.Random(0)
    assert {int(env.sample_action(rng)) for _ in range(300)} == set(range(-3, 7))


def _value(prompt):
    words = prompt.removesuffix(" =").split(" ")
    total = int(words[0])
    for sign, term in zip(words[1::2], words[2::2], strict=True):
        total += int(term) if sign == "+" else -int(term)
    return total
