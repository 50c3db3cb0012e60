"""Rewards as configs name them: what the document shows can be found, and a wrong option is known before a run."""

import re
from pathlib import Path

import pytest

from rollart import toml
from rollart.config import parse
from rollart.data.serverless.registry import check_urls
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


BASE = {"base": {"reward": "rollart.rewards.rule:sorting"}}
JUDGE = {"url": "judge.example/v1", "model": "m", "rubric": "r"}


@pytest.mark.parametrize(
    ("reward", "options", "more", "complaint"),
    [
        ("group:Rank", BASE, {}, 'tasks.t.reward: .*Rank.* scores whole groups; set tasks.t.reward_scope = "group"'),
        ("group:Length", BASE, {}, "Length.* scores whole groups"),
        ("math:Math", {}, {"reward_scope": "group"}, "Math.* scores single trajectories"),
        ("math:Math", {"max_chars": "many"}, {}, "tasks.t.reward_options.max_chars: expected a whole number"),
        ("code:Code", {"timeout_s": 0}, {}, "tasks.t.reward_options.timeout_s: "),
        ("judge:Judge", JUDGE, {}, "tasks.t.reward_options.url: 'judge.example/v1' is no URL"),
        (
            "judge:Judge",
            JUDGE | {"url": "http://h", "scale": [1, 0]},
            {},
            "tasks.t.reward_options.scale: expected worst",
        ),
        (
            "composite:Composite",
            {"parts": [{"reward": "rollart.rewards.judge:Judge", "options": JUDGE}]},
            {},
            r"tasks.t.reward_options.parts\[0\].options.url: ",
        ),
        (
            "group:Rank",
            {"base": {"reward": "rollart.rewards.group:Rank", "options": BASE}},
            {"reward_scope": "group"},
            "tasks.t.reward_options.base.reward: .* cannot be part of a reward",
        ),
    ],
)
def test_a_reward_that_cannot_work_as_it_is_named_is_known_before_a_run(reward, options, more, complaint):
    task = TaskConfig(env="sorting", reward=f"rollart.rewards.{reward}", reward_options=options, **more)
    with pytest.raises(ConfigError, match=complaint):
        reward_url(task, "t")


@pytest.mark.parametrize(
    ("url", "runtime"), [("thread://rollart.rewards.math:Math", "local"), ("rollart.rewards.math:Math", "inline")]
)
def test_a_reward_that_needs_a_main_thread_is_refused_where_there_is_none(url, runtime):
    with pytest.raises(ConfigError, match=r"tasks.sorting.reward: .* needs the main thread .*take local:// in"):
        check_urls(parse(f"runtime = '{runtime}'\n[tasks.sorting]\nreward = '{url}'"))
    check_urls(parse(f"runtime = '{runtime}'\n[tasks.sorting]\nreward = 'local://rollart.rewards.math:Math'"))


MATH = {"reward": "rollart.rewards.math:Math"}
IN_A_COMPOSITE = {"parts": [{"reward": "tests.rewards.parts:length"}, MATH]}


@pytest.mark.parametrize(
    ("reward", "options", "more", "key"),
    [
        ("composite:Composite", IN_A_COMPOSITE, "", r"parts\[1\].reward"),
        ("group:Rank", {"base": MATH}, "reward_scope = 'group'", "base.reward"),
        ("group:Length", {"base": MATH}, "reward_scope = 'group'", "base.reward"),
        (
            "composite:Composite",
            {"parts": [{"reward": "rollart.rewards.composite:Composite", "options": IN_A_COMPOSITE}]},
            "",
            r"parts\[0\].options.parts\[1\].reward",
        ),
    ],
)
def test_a_reward_within_a_reward_that_needs_a_main_thread_is_refused_where_there_is_none(reward, options, more, key):
    def config(runtime, scheme=""):
        table = f"{more}\nreward = '{scheme}rollart.rewards.{reward}'\nreward_options = {toml.value(options)}"
        return parse(f"runtime = '{runtime}'\n[tasks.sorting]\n{table}")

    complaint = rf"^tasks.sorting.reward_options.{key}: 'rollart.rewards.math:Math' needs the main .* take local:"
    for bad in (config("inline"), config("local", "thread://")):
        with pytest.raises(ConfigError, match=complaint):
            check_urls(bad)
    check_urls(config("inline", "local://"))
    check_urls(config("local"))
