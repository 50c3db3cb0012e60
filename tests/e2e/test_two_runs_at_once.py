"""Runs on one host do not meet: no port, path or process of theirs is shared, even when their configs are equal.

On a store of their own they share devices, and no device is ever used by two of them for long.
"""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from rollart.pool_view import view
from rollart.run_folder import checkpoints
from tests.e2e.laboratory import SMALL, Laboratory, Process, check_audit, steps_done, summary

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400)]

LEASE_S = 1.0
POOLS = f"""
{SMALL.replace('runtime = "inline"', 'runtime = "local"')}
[pools.H800]
device = "cpu"
[pools.H20]
device = "cpu"
count = 2
[roles.actor_train]
device_class = "H800"
[resources]
lease_s = {LEASE_S}
"""


def test_two_runs_of_one_config_complete_at_once_in_folders_of_their_own(lab: Laboratory) -> None:
    both = [lab.start("runtime=local") for _ in range(2)]
    assert [process.wait() for process in both] == [0, 0], both[0].text() + both[1].text()
    folders = sorted(path for path in lab.run.parent.iterdir() if not path.is_symlink())
    assert [path.name for path in folders] == [lab.name, f"{lab.name}-2"]
    for folder in folders:
        assert summary(folder)["outcome"] == "completed"
        check_audit(folder, steps=3, alpha=1)
    assert (lab.run.parent / "latest").resolve() in folders


def frozen_beside_another(lab: Laboratory, first: tuple[str, ...], second: tuple[str, ...]) -> tuple[Process, Process]:
    """A run that wakes after its lease, and the one that got devices of it meanwhile, which trains."""
    store = f"resources.store=file:{lab.folder / 'store'}"
    frozen = lab.start("steps=1000", store, *first, text=POOLS)
    frozen.until(lambda: steps_done(lab.run) >= 2, "its second step")
    frozen.send(signal.SIGSTOP)
    frozen.until(lambda: not any(row.holders for row in view(lab.config(store, text=POOLS))), "the end of its lease")
    other = lab.start("steps=1000", store, "log.name=other", *second, text=POOLS)
    other.until(lambda: steps_done(lab.run.with_name("other")) >= 1, "its first step")
    frozen.send(signal.SIGCONT)
    return frozen, other


def stop(process: Process, run: Path) -> None:
    """It goes on, and ends when it is told to."""
    done = steps_done(run)
    process.until(lambda: steps_done(run) >= done + 2, "two more steps")
    process.send(signal.SIGTERM)
    assert process.wait() == 130, process.text()
    check_audit(run, steps=steps_done(run), alpha=1)


def test_a_run_that_was_frozen_gives_the_devices_up_that_another_has_got_and_goes_on_with_the_rest(
    lab: Laboratory,
) -> None:
    own_trainer = "roles.actor_train.device_class=CPU"
    first, second = ((own_trainer, f"roles.actor_gen.workers={{ H20 = {number} }}") for number in (2, 1))
    frozen, other = frozen_beside_another(lab, first, second)
    frozen.until(lambda: "going on without inference-" in frozen.text(), "its smaller half")
    assert "of pool H20 on localhost has gone to run 'other-" in frozen.text()
    stop(frozen, lab.run)
    stop(other, lab.run.with_name("other"))
    places = [
        where.partition(" ")[0]
        for run in (lab.run, lab.run.with_name("other"))
        for name, where in summary(run)["resources"]["workers"].items()
        if name.startswith("inference-")
    ]
    assert sorted(places) == ["H20:0", "H20:1"]


def test_a_run_that_was_frozen_and_whose_trainer_has_no_device_any_more_ends_with_a_checkpoint(lab: Laboratory) -> None:
    frozen, other = frozen_beside_another(lab, (), ())
    assert frozen.wait() == 1, frozen.text()
    (error,) = [line for line in frozen.text().splitlines() if line.startswith("rollart: error: ")]
    assert "H800:0 of pool H800 on localhost, on which training-0 trains, has gone to run 'other-" in error
    done = steps_done(lab.run)
    assert checkpoints(lab.run) == [done]
    assert f"go on from step {done} with: rollart train --resume {lab.run}" in frozen.text()
    check_audit(lab.run, steps=done, alpha=1)
    stop(other, lab.run.with_name("other"))
