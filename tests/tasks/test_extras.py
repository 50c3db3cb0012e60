"""Tasks behind an extra; each test runs where the extra is installed."""

import logging
import random

import pytest

from rollart.config import parse
from rollart.errors import ConfigError
from rollart.protocols import SupportsWarmup
from rollart.tasks import registry


def _make(text):
    config = parse(text)
    return registry.specs(config), registry.make_env(config.tasks["x"], "x")


def test_reasoning_repeats_its_items_and_scores_the_right_answer():
    gym = pytest.importorskip("reasoning_gym")
    specs, env = _make("[tasks.x]\nenv='reasoning'\noptions={dataset='chain_sum', dataset_options={max_terms=3}}")
    assert specs["x"].max_turns == 1
    question, _ = env.reset(5)
    assert env.reset(6)[0] != question
    assert env.reset(5)[0] == question
    answer = gym.create_dataset("chain_sum", seed=5, size=1, max_terms=3)[0]["answer"]
    assert env.step(f" {answer} ")[1:4] == (1.0, True, False)
    assert env.step("I do not know")[1] < 1.0
    assert int(env.sample_action(random.Random(1))) == int(env.sample_action(random.Random(1)))


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (
            "{dataset='basic_arithmetik'}",
            "options.dataset: 'basic_arithmetik' unknown; did you mean 'basic_arithmetic'",
        ),
        ("{dataset_options={min_termz=1}}", "min_termz"),
        ("{dataset_options={min_terms=-1}}", "min_terms must be positive"),
    ],
)
def test_reasoning_names_the_wrong_option(options, reason):
    pytest.importorskip("reasoning_gym")
    with pytest.raises(ConfigError, match=reason):
        _make(f"[tasks.x]\nenv='reasoning'\noptions={options}")


def test_a_generator_without_written_answers_is_left_out_of_the_warm_up():
    pytest.importorskip("reasoning_gym")
    _, env = _make("[tasks.x]\nenv='reasoning'\noptions={dataset='rubiks_cube'}")
    assert not isinstance(env, SupportsWarmup)


def test_gem_plays_guess_the_number():
    pytest.importorskip("gem")
    handlers = list(logging.getLogger().handlers)
    _, env = _make("[tasks.x]\nenv='gem'\noptions={id='game:GuessTheNumber-v0-easy'}")
    assert logging.getLogger().handlers == handlers
    assert env.reset(3) == env.reset(3)
    rewards = [_guess(env, 3, number) for number in range(1, 11)]
    assert sum(reward == 1.0 for reward in rewards) == 1
    assert env.sample_action(random.Random(0)).startswith("\\boxed{")


def test_gem_names_the_nearest_id():
    pytest.importorskip("gem")
    with pytest.raises(
        ConfigError, match=r"tasks.x.options.id: 'game:GuessTheNumber' unknown; did you mean 'game:Guess"
    ):
        _make("[tasks.x]\nenv='gem'\noptions={id='game:GuessTheNumber'}")


@pytest.mark.parametrize(("task", "package"), [("reasoning", "reasoning_gym"), ("gem", "gem")])
def test_a_missing_extra_is_named_with_its_installation(task, package):
    try:
        __import__(package)
    except ImportError:
        options = "options={id='x'}" if task == "gem" else ""
        with pytest.raises(ConfigError, match=rf"pip install -e '\.\[{task}\]'"):
            registry.specs(parse(f"[tasks.{task}]\n{options}"))
    else:
        assert next(info for info in registry.describe() if info.name == task).available


def _guess(env, seed, number):
    env.reset(seed)
    return env.step(f"\\boxed{{{number}}}")[1]
