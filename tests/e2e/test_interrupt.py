"""Ctrl-C: the first one saves, the second one ends at once; a resumed run goes on as if it had not been interrupted."""

from __future__ import annotations

import signal

import msgspec
import psutil
import pytest

from rollart.cli import main
from rollart.control.task_source import TaskSource
from rollart.errors import RunFolderError
from rollart.pipeline import train
from rollart.run_folder import checkpoints
from rollart.tasks import registry
from tests.e2e.hostile import seen
from tests.e2e.laboratory import PATIENCE_S, SMALL, Laboratory, batches, check_audit, lines, steps_done, summary

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400)]

# A bound that nothing reaches: what grows stale is queued again, which shifts the indices of those behind it.
LOCAL = (
    SMALL.replace('runtime = "inline"', 'runtime = "local"\nalpha = 4')
    + """
[tasks.synthetic]
max_turn_tokens = 4
[tasks.synthetic.options]
turns_max = 2
step_latency_s = 0.02
"""
)

INTERRUPTS_DURING_THE_SECOND_EVALUATION = """
[tasks.faulty]
env = "tests.e2e.hostile:Faulty"
options = { fault = "interrupt", where = "reset", every = 2 }
weight = 0
reset_timeout_s = 1000
"""


def test_an_interrupted_run_goes_on_in_the_same_order_and_trains_nothing_twice(lab: Laboratory) -> None:
    first = lab.start("steps=1000", "rollout.zero_variance=keep", text=LOCAL)
    first.until(lambda: steps_done(lab.run) >= 3, "its third step")
    first.send(signal.SIGINT)
    assert first.wait() == 130, first.text()
    (done,) = checkpoints(lab.run)
    assert f"go on from step {done} with: rollart train --resume {lab.run}" in first.text()
    assert (summary(lab.run)["outcome"], summary(lab.run)["steps"]) == ("stopped", done)
    check_audit(lab.run, steps=done, alpha=4)

    again = lab.launch("train", "--resume", str(lab.run), f"steps={done + 1000}")
    again.until(lambda: steps_done(lab.run) >= done + 2, "two more steps")
    workers = again.workers()
    assert len(workers) == 3, "an engine, a trainer, an environment worker"
    again.worker("training-0").suspend()
    again.send(signal.SIGINT)
    again.until(lambda: "stopping after this step" in again.text(), "its end")
    again.send(signal.SIGINT)
    assert again.wait() == 130, again.text()
    assert not any(map(psutil.Process.is_running, workers)), "nothing outlives the command"
    assert lab.weights() == []

    end = checkpoints(lab.run)[-1] + 4
    assert main(["train", "--resume", str(lab.run), f"steps={end}", "runtime=inline"]) == 0
    assert summary(lab.run)["outcome"] == "completed"
    check_audit(lab.run, steps=end, alpha=4)
    check_order(lab)
    metrics = [line["step"] for line in lines(lab.run / "metrics.jsonl") if "train/loss" in line]
    assert metrics == list(range(1, end + 1))


def check_order(lab: Laboratory) -> None:
    """The n-th group has the n-th task and seed of the run's seed, before, between and after the interrupts."""
    config = lab.config(text=LOCAL)
    source = TaskSource(config.seed, registry.specs(config))
    groups = [group for batch in batches(lab.run) for group in batch["groups"]]
    indices = [int(group["group"][1:]) for group in groups]
    assert [(group["task"], group["seed"]) for group in groups] == [source.draw(index) for index in indices]
    missing = set(range(max(indices))) - set(indices)
    assert len(missing) <= summary(lab.run)["groups"]["causes"]["cancelled"], "a group was lost at an interrupt"


def test_an_interrupt_does_not_wait_for_an_evaluation(lab: Laboratory) -> None:
    seen.clear()
    text = SMALL + INTERRUPTS_DURING_THE_SECOND_EVALUATION
    assert train(lab.config("steps=1000", "eval.every=2", text=text)) == 130
    (done,) = checkpoints(lab.run)
    assert done in (2, 3)
    assert (summary(lab.run)["outcome"], summary(lab.run)["steps"]) == ("stopped", done)
    check_audit(lab.run, steps=done, alpha=1)


def test_an_interrupt_before_the_first_step_ends_the_run_cleanly(lab: Laboratory) -> None:
    process = lab.start(text=LOCAL)
    process.until(lambda: lab.run.exists() and "starting workers" in process.text(), "the start of its workers")
    workers = process.workers()
    process.send(signal.SIGINT)
    assert process.wait() == 130, process.text()
    assert "before the first checkpoint" in process.text()
    assert "Traceback" not in process.text()
    _, alive = psutil.wait_procs(workers, PATIENCE_S)
    assert not alive


def test_a_terminal_that_goes_away_stops_the_run_with_a_checkpoint_however_often_it_says_so(lab: Laboratory) -> None:
    process = lab.start("steps=1000", "rollout.zero_variance=keep", text=LOCAL)
    process.until(lambda: steps_done(lab.run) >= 1, "its first step")
    process.send(signal.SIGHUP)
    process.until(lambda: "stopping after this step" in process.text(), "its end")
    process.send(signal.SIGHUP)
    assert process.wait() == 130, process.text()
    assert summary(lab.run)["outcome"] == "stopped"
    assert len(checkpoints(lab.run)) == 1
    assert lab.weights() == []


def test_a_checkpoint_without_what_control_needs_is_refused_in_one_line(lab: Laboratory) -> None:
    assert train(lab.config("steps=1")) == 0
    path = lab.run / "checkpoints" / "step-000001" / "control.msgpack"
    state = msgspec.msgpack.decode(path.read_bytes())
    path.write_bytes(msgspec.msgpack.encode({**state, "scheduler": {}}))
    with pytest.raises(RunFolderError, match=r"the checkpoint of step 1 in .* is damaged: KeyError: 'source'"):
        train(lab.config("steps=2"), resume=lab.run)


def test_what_a_resumed_run_went_on_from_is_kept_for_as_long_as_it_runs(lab: Laboratory) -> None:
    assert train(lab.config("steps=2", "log.checkpoint_every=1", "log.checkpoints_kept=1")) == 0
    assert train(lab.config("steps=6", "log.checkpoint_every=1", "log.checkpoints_kept=1"), resume=lab.run) == 0
    assert checkpoints(lab.run) == [2, 6], "every later one was written with the model's files of step 2"
    assert "cannot be written" not in (lab.run / "run.log").read_text()


def test_a_run_that_goes_on_from_an_older_checkpoint_forgets_what_came_after_it(lab: Laboratory) -> None:
    assert train(lab.config("steps=4", "log.checkpoint_every=1", "log.checkpoints_kept=9")) == 0
    assert checkpoints(lab.run) == [1, 2, 3, 4]
    with pytest.raises(RunFolderError, match="no checkpoint of step 7; there are: 1, 2, 3, 4"):
        train(lab.config("steps=5"), resume=lab.run, checkpoint=7)
    assert train(lab.config("steps=3", "log.checkpoints_kept=9"), resume=lab.run, checkpoint=2) == 0
    assert checkpoints(lab.run) == [1, 2, 3]
    check_audit(lab.run, steps=3, alpha=1)
