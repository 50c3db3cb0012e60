import random

import gymnasium
import pytest

from rollart.errors import ConfigError
from rollart.protocols import Env, SupportsWarmup
from rollart.tasks.adapters import GymnasiumOptions, GymnasiumText, gymnasium_text


def test_a_discrete_gymnasium_environment_plays_by_names():
    ours = gymnasium_text("CliffWalking-v1", ["up", "right", "down", "left"])
    theirs = gymnasium.make("CliffWalking-v1")
    assert isinstance(ours, Env)
    assert isinstance(ours, SupportsWarmup)
    assert ours.reset(3)[0] == str(theirs.reset(seed=3)[0])
    for name, number in [("Up", 0), ("go right", 1), ("left", 3), ("down", 2)]:
        observation, reward, terminated, truncated, _ = ours.step(name)
        expected = theirs.step(number)
        assert (observation, reward, terminated, truncated) == (str(expected[0]), *expected[1:4])


def test_without_names_the_actions_are_numbers():
    env = gymnasium_text("Taxi-v4")
    before, _ = env.reset(1)
    assert env.step("sit")[0] == f"Invalid action.\n{before}"
    assert "invalid" not in env.step("I take 5.")[4]
    rng = random.Random(0)
    assert {env.sample_action(rng) for _ in range(99)} == set("012345")


class Echo(gymnasium.Env):
    action_space = gymnasium.spaces.Text(min_length=1, max_length=5, charset="abc")
    observation_space = gymnasium.spaces.Text(max_length=5, charset="abc")

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return "a", {}

    def step(self, action):
        return action, 1.0, True, False, {}


def test_a_text_gymnasium_environment_takes_the_text_itself():
    gymnasium.register("RollartEcho-v0", entry_point=Echo)
    try:
        env = gymnasium_text("RollartEcho-v0")
        env.reset(0)
        assert env.step("hello")[4] == {"invalid": True}
        assert env.step("abca")[:2] == ("abca", 1.0)
        action = env.sample_action(random.Random(0))
        assert action == env.sample_action(random.Random(0))
        assert set(action) <= set("abc")
    finally:
        gymnasium.registry.pop("RollartEcho-v0")


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (GymnasiumOptions(id="Taxi"), "id: 'Taxi' unknown; did you mean 'Taxi-v4'"),
        (GymnasiumOptions(id="Taxi-v4", actions=["up"]), "actions: 1 names given, but 'Taxi-v4' has 6"),
        (GymnasiumOptions(id="Pendulum-v1"), "only Discrete and Text"),
        (GymnasiumOptions(id="Taxi-v4", kwargs={"speed": 3}), "gymnasium.make.*speed"),
    ],
)
def test_what_cannot_work_is_said_when_it_is_built(options, reason):
    with pytest.raises(ConfigError, match=reason):
        GymnasiumText(options)
