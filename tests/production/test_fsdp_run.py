"""A run whose trainer is two ranks: it trains, ends clearly when one of them dies, and goes on with another number."""

from __future__ import annotations

import psutil
import pytest

from rollart.cli import main
from rollart.run_folder import checkpoints
from tests.e2e.laboratory import Laboratory, check_audit, summary

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400)]

RANKS = ("runtime=local", "trainer=fsdp2", "roles.actor_train.workers=2", "roles.environment.workers=1")


def test_the_death_of_a_rank_ends_the_run_and_one_rank_takes_it_up_again(lab: Laboratory) -> None:
    process = lab.start(*RANKS, "steps=1000", "log.checkpoint_every=1", "train.kl_coef=0.01")
    process.until(lambda: len(checkpoints(lab.run)) >= 2, "its second checkpoint")
    workers = process.workers()
    process.worker("training-1").kill()
    assert process.wait() == 1, process.text()
    (error,) = [line for line in process.text().splitlines() if line.startswith("rollart: error: ")]
    assert "training-1" in error
    assert "SIGKILL" in error
    assert not any(map(psutil.Process.is_running, workers))
    assert summary(lab.run)["outcome"].startswith("WorkerDied: ")
    end = checkpoints(lab.run)[-1] + 1
    words = ["runtime=inline", "roles.actor_train.workers=1", f"steps={end}"]
    assert main(["train", "--resume", str(lab.run), *words]) == 0
    check_audit(lab.run, steps=end, alpha=1)
    assert main(["eval", str(lab.run), "--episodes", "1"]) == 0
