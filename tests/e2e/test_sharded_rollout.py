"""Trajectories in shard processes: the run trains within its bound, also when a shard or an engine is killed."""

from __future__ import annotations

import pytest

from rollart.pipeline import train
from tests.e2e.laboratory import Laboratory, check_audit, steps_done, summary
from tests.e2e.test_schedules import MIXTURE

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400)]

TWO_SHARDS = ("runtime=local", "rollout.shard_trajectories=6", "rollout.zero_variance=keep")
"""Two groups a batch and alpha = 1 make twelve trajectories in flight."""


def test_a_sharded_run_trains_every_step_within_its_bound(lab: Laboratory) -> None:
    assert train(lab.config(*TWO_SHARDS, "steps=4", text=MIXTURE)) == 0
    check_audit(lab.run, steps=4, alpha=1)
    found = summary(lab.run)
    assert found["outcome"] == "completed"
    assert {"rollout-0", "rollout-1"} <= set(found["resources"]["workers"])
    assert found["trajectories"] == 4 * 2 * 3
    assert found["waits_s"]["generate"] + found["waits_s"]["step"] > 0


def test_a_shard_that_is_killed_is_replaced_and_nothing_is_trained_twice(lab: Laboratory) -> None:
    process = lab.start(*TWO_SHARDS, "steps=12", text=MIXTURE)
    process.until(lambda: steps_done(lab.run) >= 2, "its second step")
    process.worker("rollout-0").kill()
    assert process.wait() == 0, process.text()
    check_audit(lab.run, steps=12, alpha=1)
    found = summary(lab.run)
    assert found["resources"]["restarts"] == {"rollout-0": 1}
    assert "rollout-0.1" in found["resources"]["workers"]


def test_workers_of_a_sharded_run_that_are_killed_are_replaced(lab: Laboratory) -> None:
    process = lab.start(*TWO_SHARDS, "steps=12", "roles.actor_gen.workers=2", text=MIXTURE)
    process.until(lambda: steps_done(lab.run) >= 2, "its second step")
    process.worker("inference-0").kill()
    process.until(lambda: steps_done(lab.run) >= 5, "its fifth step")
    process.worker("environment-0").kill()
    assert process.wait() == 0, process.text()
    check_audit(lab.run, steps=12, alpha=1)
    assert summary(lab.run)["resources"]["restarts"] == {"inference-0": 1, "environment-0": 1}
