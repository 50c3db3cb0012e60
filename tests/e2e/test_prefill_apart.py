"""Runs whose prompts are read by workers of their own: the same trajectories, deaths on either side, nothing left."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from rollart.data.weights_folder import SHARED_MEMORY, sweep_stale
from rollart.pipeline import train
from tests.e2e.laboratory import SMALL, Laboratory, check_audit, lines, steps_done, summary
from tests.e2e.test_schedules import MIXTURE

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400)]

PARTS = """
[roles.prefill]
workers = 1
[roles.actor_gen]
workers = 2
"""
APART = MIXTURE + PARTS
SAMPLED = ("log.trajectories_every=1", "log.trajectories=64")


def parcels(lab: Laboratory) -> list[Path]:
    """What runs of this place have in shared memory for KV on its way."""
    return list(SHARED_MEMORY.glob(f"rollart-weights-kv_{lab.name}*"))


def first_batch(run: Path) -> dict[str, dict[str, Any]]:
    return {each["trajectory_id"]: each for each in lines(run / "trajectories" / "step-000001.jsonl")}


def test_the_first_batch_is_that_of_a_run_whose_workers_do_both(lab: Laboratory) -> None:
    for name, text in (("both", MIXTURE), ("apart", APART)):
        config = lab.config("steps=1", "schedule=sync_plus", f"log.name={lab.name}-{name}", *SAMPLED, text=text)
        assert train(config) == 0
    both, apart = (lab.folder / "runs" / f"{lab.name}-{name}" for name in ("both", "apart"))
    there = first_batch(both)
    assert len(there) == 2 * 3
    for name, trajectory in first_batch(apart).items():
        assert trajectory["tokens"] == there[name]["tokens"]
        assert trajectory["versions"] == there[name]["versions"]
        assert trajectory["logprobs"] == pytest.approx(there[name]["logprobs"], abs=1e-4)
    found = summary(apart)["prefill"]
    assert found["read"] > 0
    assert found["received_tokens"] > 0
    assert found["by_decode_workers"] == {}
    assert "prefill" not in summary(both)
    assert parcels(lab) == []


def test_a_worker_of_either_kind_that_is_killed_is_replaced_and_the_run_goes_on(lab: Laboratory) -> None:
    gate = lab.folder / "gate"
    held = (
        'tasks.friendly.env="tests.e2e.hostile:Held"',
        f"tasks.friendly.options.gate={json.dumps(str(gate))}",
        "tasks.friendly.step_timeout_s=300",
    )
    process = lab.start("runtime=local", "steps=10", *held, text=SMALL + PARTS)
    for name in ("prefill-0", "inference-0"):
        done = steps_done(lab.run)
        process.until(lambda done=done: steps_done(lab.run) >= done + 2, "two more steps")
        gate.touch()
        process.worker(name).kill()
        process.until(lambda name=name: f"{name}.1 runs on CPU:" in process.text(), "a new worker")
        gate.unlink()
    assert process.wait() == 0, process.text()
    assert "Traceback" not in process.text()
    check_audit(lab.run, steps=10, alpha=1)
    found = summary(lab.run)
    assert found["resources"]["restarts"] == {"prefill-0": 1, "inference-0": 1}
    assert found["prefill"]["received_tokens"] > 0
    assert parcels(lab) == []


def test_shards_let_prompts_be_read_apart_too(lab: Laboratory) -> None:
    sharded = ("runtime=local", "steps=2", "rollout.shard_trajectories=6", "rollout.zero_variance=keep")
    assert train(lab.config(*sharded, text=APART)) == 0
    check_audit(lab.run, steps=2, alpha=1)
    found = summary(lab.run)
    assert {"rollout-0", "rollout-1", "prefill-0"} <= set(found["resources"]["workers"])
    assert found["prefill"]["read"] >= 2 * 2 * 3
    assert found["prefill"]["received_tokens"] > 0
    assert found["prefill"]["by_decode_workers"] == {}


def test_what_a_killed_run_leaves_is_removed_by_the_next(lab: Laboratory) -> None:
    process = lab.start("runtime=inline", "steps=1000", text=APART)
    process.until(lambda: steps_done(lab.run) >= 1, "its first step")
    (folder,) = parcels(lab)
    process.send(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert folder.is_dir()
    sweep_stale(SHARED_MEMORY)
    assert parcels(lab) == []
    assert lab.weights() == []
