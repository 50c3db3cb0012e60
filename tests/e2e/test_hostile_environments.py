"""Environments and rewards that hang, raise, dawdle or answer nonsense cost their own trajectories and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollart.cli import main
from rollart.pipeline import train
from tests.e2e.hostile import seen
from tests.e2e.laboratory import SMALL, Laboratory, batches, check_audit, lines, summary

pytestmark = pytest.mark.e2e

FAULTS = (
    ("hang", "step"),
    ("hang", "reset"),
    ("raise", "step"),
    ("raise", "reset"),
    ("exit", "step"),
    ("none", "step"),
    ("none", "reset"),
    ("nan", "step"),
    ("slow", "step"),
)


def faulty(fault: str, where: str, every: int) -> str:
    return f"""
[tasks.{fault}_in_{where}]
env = "tests.e2e.hostile:Faulty"
options = {{ fault = "{fault}", where = "{where}", every = {every} }}
max_turn_tokens = 4
reset_timeout_s = 0.3
step_timeout_s = 0.3
env_retries = 0
"""


def rewarded(function: str) -> str:
    return f"""
[tasks.{function}]
env = "tests.e2e.hostile:Friendly"
reward = "tests.e2e.hostile:{function}"
max_turn_tokens = 4
"""


def test_a_mixture_of_faults_completes_and_siblings_of_a_failed_member_are_trained_on(lab: Laboratory) -> None:
    seen.clear()
    text = SMALL + "".join(faulty(fault, where, every=4) for fault, where in FAULTS)
    text += rewarded("raises") + rewarded("not_a_number")
    assert train(lab.config("steps=12", "rollout.groups_per_batch=4", "rollout.zero_variance=keep", text=text)) == 0
    check_audit(lab.run, steps=12, alpha=1)
    found = summary(lab.run)
    assert found["outcome"] == "completed"
    assert {f"{fault} in {where}" for fault, where in FAULTS} | {"raises", "not_a_number"} <= set(seen)
    assert found["discarded"]["env_error"] > 0
    assert found["discarded"]["reward_error"] > 0
    stopped = [line for line in lines(lab.run / "metrics.jsonl") if line.get("stopped/env_error")]
    assert stopped, "failures are counted in the metrics, too"
    groups = [group for batch in batches(lab.run) for group in batch["groups"]]
    attempts = [{name.rpartition("-")[2] for name in group["trajectories"]} for group in groups]
    assert any({"a0", "a1"} <= each for each in attempts), "a failed member runs again, its siblings live on"


def test_every_environment_that_was_opened_is_closed_at_the_end(lab: Laboratory) -> None:
    seen.clear()
    assert train(lab.config()) == 0
    assert seen["opened"] == seen["closed"] > 0


@pytest.mark.parametrize(
    ("task", "cause"),
    [
        (faulty("hang", "step", 1), "step of task 'hang_in_step' did not answer within 0.3 s"),
        (faulty("hang", "reset", 1), "reset of task 'hang_in_reset' did not answer within 0.3 s"),
        (faulty("raise", "step", 1), "KeyError: 'no such page' (hostile.py:"),
        (faulty("none", "reset", 1), "reset of task 'none_in_reset' returned None; expected (observation, info)"),
        (faulty("nan", "step", 1), "returned reward float nan; expected a finite number"),
        (rewarded("hopeless"), "ZeroDivisionError: no points"),
    ],
)
def test_a_task_that_always_fails_alone_ends_the_run_with_its_cause(
    task: str, cause: str, lab: Laboratory, capfd: pytest.CaptureFixture[str]
) -> None:
    toml = lab.folder / "alone.toml"
    toml.write_text(SMALL + task)
    words = lab.overrides("tasks.friendly.weight=0", "rollout.member_retries=0", "rollout.groups_per_batch=1")
    assert main(["train", str(toml), *words]) == 1
    error = capfd.readouterr().err
    assert error.startswith("rollart: error: ")
    assert "groups in a row were dropped" in error
    assert cause in error
    assert cause in summary(lab.run)["outcome"]
    assert "RolloutError" in Path(lab.run / "run.log").read_text()
