"""Rewards behind URLs in whole runs: what they do wrong costs their own trajectories, and every one ends once."""

from __future__ import annotations

import pytest

from rollart.pipeline import train
from tests.e2e.laboratory import SMALL, Laboratory, check_audit, lines, summary

pytestmark = pytest.mark.e2e

BASE = SMALL.replace(
    """[tasks.friendly]
env = "tests.e2e.hostile:Friendly"
max_turn_tokens = 4
""",
    "",
)
FUNCTIONS = ("friendly", "moody", "deadly", "of_groups")


def _task(function: str, more: str = "") -> str:
    return f"""
[tasks.{function}]
env = "tests.e2e.hostile:Friendly"
reward = "local://tests.e2e.reward_functions:{function}"
reward_timeout_s = 1.0
max_turn_tokens = 4
{more}
[serverless.{function}]
idle_s = 1.0
backoff_s = 0.01
price_per_second = 2.0
"""


def test_functions_that_hang_raise_and_die_cost_their_own_trajectories(lab: Laboratory) -> None:
    text = BASE + "".join(map(_task, FUNCTIONS[:3])) + _task("of_groups", 'reward_scope = "group"')
    overrides = ("steps=8", "runtime=local", "rollout.groups_per_batch=4", "rollout.zero_variance=keep")
    assert train(lab.config(*overrides, text=text)) == 0
    check_audit(lab.run, steps=8, alpha=1)
    found = summary(lab.run)
    assert found["outcome"] == "completed"
    assert found["discarded"]["reward_error"] > 0
    rewards = found["rewards"]
    assert set(rewards) == set(FUNCTIONS)
    assert rewards["friendly"]["failures"] == {}
    assert rewards["friendly"]["results"] == rewards["friendly"]["calls"] > 0
    assert {"raised", "timeout"} <= set(rewards["moody"]["failures"])
    assert rewards["deadly"]["failures"]["endpoint"] > 0
    for usage in rewards.values():
        assert usage["busy_s"] <= usage["allocated_s"]
        assert usage["cost"] == pytest.approx(2.0 * usage["billed_s"])
    stepped = [line for line in lines(lab.run / "metrics.jsonl") if "train/loss" in line]
    assert any("function/friendly/busy_s" in line for line in stepped)


def test_the_same_functions_serve_a_run_in_one_process(lab: Laboratory) -> None:
    text = BASE + _task("friendly").replace("local://", "") + _task("of_groups", 'reward_scope = "group"')
    assert train(lab.config("steps=2", "rollout.zero_variance=keep", text=text)) == 0
    assert summary(lab.run)["rewards"]["friendly"]["failures"] == {}
