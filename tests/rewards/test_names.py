"""Rewards as configs name them: what the document shows can be found, and a wrong option is known before a run."""

import re
from pathlib import Path

import pytest

from rollart.config import parse
from rollart.errors import ConfigError
from rollart.sections import TaskConfig
from rollart.tasks.registry import reward_url

DOCUMENT = Path(__file__).parents[2] / "docs" / "rewards.md"
TABLES = re.findall(r"```toml\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)


@pytest.mark.parametrize("text", TABLES)
def test_the_rewards_in_the_document_exist_and_take_those_options(text):
    for name, task in parse(text).tasks.items():
        assert reward_url(task, name).startswith("rollart.rewards.")


def test_every_kind_is_in_the_document():
    assert len(TABLES) >= 6


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"url": "http://h/v1", "model": "m", "rubrik": "r"}, ".rubrik: unknown option; did you mean 'rubric'?"),
        ({"url": "http://h/v1", "rubric": "r"}, ": 'rollart.rewards.judge:Judge': missing a required .*'model'"),
    ],
)
def test_a_wrong_or_missing_option_of_a_class_is_known_before_a_run(options, complaint):
    task = TaskConfig(env="sorting", reward="rollart.rewards.judge:Judge", reward_options=options)
    with pytest.raises(ConfigError, match=f"tasks.t.reward_options{complaint}"):
        reward_url(task, "t")
