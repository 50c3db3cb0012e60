"""Each of the five schedules trains a mixture of two tasks, one of them slow, within its staleness bound."""

from __future__ import annotations

import pytest

from rollart.pipeline import train
from rollart.schedule import SCHEDULES
from tests.e2e.laboratory import SMALL, Laboratory, check_audit, summary

pytestmark = pytest.mark.e2e

MIXTURE = (
    SMALL
    + """
[tasks.synthetic]
max_turn_tokens = 4
[tasks.synthetic.options]
turns_min = 2
turns_max = 2
words = 1
step_latency_s = 0.05
latency_tail = "lognormal"
per_member = true
"""
)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_schedule_completes_within_its_bound_and_trains_nothing_twice(schedule: str, lab: Laboratory) -> None:
    config = lab.config(f"schedule={schedule}", "steps=4", "rollout.zero_variance=keep", text=MIXTURE)
    assert train(config) == 0
    check_audit(lab.run, steps=4, alpha=config.effective_alpha)
    found = summary(lab.run)
    assert found["outcome"] == "completed"
    assert found["schedule"] == schedule
    assert found["alpha"] == config.effective_alpha
    assert set(found["tasks"]) == {"friendly", "synthetic"}
    assert found["trajectories"] == 4 * 2 * 3
    assert sum(found["age_histogram"].values()) == 4 * 2 * 3


@pytest.mark.parametrize(("on_target", "free_slots"), [("abort", "train_start"), ("keep", "train_end")])
@pytest.mark.parametrize("alpha", [2, 0.5])
def test_a_batch_may_be_smaller_than_the_groups_in_flight(
    on_target: str, free_slots: str, alpha: float, lab: Laboratory
) -> None:
    policy = (f"rollout.on_target={on_target}", f"rollout.free_slots={free_slots}", "rollout.extra_groups=4")
    config = lab.config(f"alpha={alpha}", *policy, "steps=5", text=MIXTURE)
    assert train(config) == 0
    check_audit(lab.run, steps=5, alpha=alpha)
    assert summary(lab.run)["outcome"] == "completed"
