"""SIGKILL of a worker or of the driver: it is replaced, or a clear end, nothing left over, and a checkpoint."""

from __future__ import annotations

import json
import signal

import psutil
import pytest

from rollart.cli import main
from rollart.run_folder import checkpoints
from tests.e2e.laboratory import PATIENCE_S, SMALL, Laboratory, check_audit, steps_done, summary

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400)]

LONG = ("runtime=local", "steps=1000", "log.checkpoint_every=1")


@pytest.mark.parametrize("role", ["inference", "environment"])
def test_a_worker_that_is_killed_is_replaced_and_the_run_goes_on(role: str, lab: Laboratory) -> None:
    process = lab.start("runtime=local", "steps=12", "log.checkpoint_every=1")
    process.until(lambda: steps_done(lab.run) >= 2, "its second step")
    process.worker(f"{role}-0").kill()
    assert process.wait() == 0, process.text()
    assert f"worker {role}-0 died: its process was killed by SIGKILL" in process.text()
    assert f"{role}-0.1 runs on CPU:" in process.text()
    assert "Traceback" not in process.text()
    check_audit(lab.run, steps=12, alpha=1)
    resources = summary(lab.run)["resources"]
    assert resources["restarts"] == {f"{role}-0": 1}
    assert f"{role}-0.1" in resources["workers"]


def test_an_inference_worker_that_hangs_is_ended_and_replaced_and_the_run_goes_on(lab: Laboratory) -> None:
    words = ("roles.actor_gen.workers=2", "roles.environment.workers=1", "weights.update_timeout_s=10")
    process = lab.start("runtime=local", "steps=1000", *words)
    process.until(lambda: steps_done(lab.run) >= 2, "its second step")
    process.worker("inference-1").suspend()
    process.until(lambda: "inference-1.1 runs on CPU:" in process.text(), "a new worker")
    done = steps_done(lab.run)
    process.until(lambda: steps_done(lab.run) >= done + 2, "two more steps")
    process.send(signal.SIGTERM)
    assert process.wait() == 130, process.text()
    assert process.text().count("no answer within 10 s (weights.update_timeout_s); it is ended and replaced") == 1
    assert "Traceback" not in process.text()
    check_audit(lab.run, steps_done(lab.run), alpha=1)
    assert summary(lab.run)["resources"]["restarts"] == {"inference-1": 1}


def test_a_worker_that_dies_again_and_again_ends_the_run_when_nothing_takes_its_place(lab: Laboratory) -> None:
    text = SMALL.replace("Friendly", "Deadly")
    process = lab.start("runtime=local", text=text)
    assert process.wait() == 1, process.text()
    (error,) = [line for line in process.text().splitlines() if line.startswith("rollart: error: ")]
    assert "environment-0" in error
    assert "nothing takes its place: it died 4 times" in error
    assert summary(lab.run)["resources"]["restarts"] == {"environment-0": 4}


def test_the_death_of_the_trainer_ends_the_run_with_one_clear_line(lab: Laboratory) -> None:
    process = lab.start(*LONG)
    process.until(lambda: len(checkpoints(lab.run)) >= 2, "its second checkpoint")
    workers = process.workers()
    process.worker("training-0").kill()
    assert process.wait() == 1, process.text()
    (error,) = [line for line in process.text().splitlines() if line.startswith("rollart: error: ")]
    assert "training-0" in error
    assert "SIGKILL" in error
    assert f"go on from step {checkpoints(lab.run)[-1]} with: rollart train --resume {lab.run}" in process.text()
    assert "Traceback" not in process.text()
    assert not any(map(psutil.Process.is_running, workers))
    assert lab.weights() == []
    outcome = summary(lab.run)["outcome"]
    assert outcome.startswith("WorkerDied: ")
    assert "SIGKILL" in outcome
    goes_on(lab)


def test_an_error_that_is_not_the_trainers_costs_no_finished_step(lab: Laboratory) -> None:
    gate = lab.folder / "gate"
    task = f"""
[tasks.breakable]
env = "tests.e2e.hostile:Breakable"
options = {{ gate = {json.dumps(str(gate))} }}
max_turn_tokens = 4
"""
    process = lab.start(*LONG[:2], "tasks.friendly.weight=0", "log.checkpoint_every=0", text=SMALL + task)
    process.until(lambda: steps_done(lab.run) >= 2, "its second step")
    gate.touch()
    assert process.wait() == 1, process.text()
    (error,) = [line for line in process.text().splitlines() if line.startswith("rollart: error: ")]
    assert "groups in a row were dropped" in error
    assert "it is broken" in error
    assert "ending after this step, with a checkpoint: " in process.text()
    assert checkpoints(lab.run) == [steps_done(lab.run)]
    assert f"go on from step {steps_done(lab.run)} with: rollart train --resume {lab.run}" in process.text()
    gate.unlink()
    goes_on(lab)


def test_the_death_of_the_driver_ends_all_workers(lab: Laboratory) -> None:
    process = lab.start(*LONG)
    process.until(lambda: len(checkpoints(lab.run)) >= 2, "its second checkpoint")
    workers = process.workers()
    process.send(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    _, alive = psutil.wait_procs(workers, PATIENCE_S)
    assert not alive
    goes_on(lab)
    assert lab.weights() == [], "the next run clears up after the dead one"


def goes_on(lab: Laboratory) -> None:
    """The newest checkpoint is whole, and what came after it is made again."""
    end = checkpoints(lab.run)[-1] + 2
    assert main(["train", "--resume", str(lab.run), f"steps={end}", "runtime=inline"]) == 0
    check_audit(lab.run, steps=end, alpha=1)
