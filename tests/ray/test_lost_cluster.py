"""The servers of Ray that a run hangs on die under it: it says so, in one clear line, and how to go on.

The run has a cluster of its own, and lives in a container of sorts: its parent is process 1, which Ray takes for none.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import psutil
import pytest

from rollart.run_folder import checkpoints
from tests.e2e.laboratory import SMALL, Laboratory, Process, check_audit, steps_done, summary

pytestmark = [pytest.mark.e2e]

CONTAINER = ["unshare", "--map-root-user", "--fork", "--pid", "--mount-proc", "--kill-child"]
AS_PROCESS_1 = ["sh", "-c", '"$@"; exit $?', "sh"]


def start(lab: Laboratory, tmp_path: Path) -> Process:
    if subprocess.run([*CONTAINER, "true"], capture_output=True, check=False).returncode:
        pytest.skip("no namespace for processes can be made (unshare)")
    patience = "RAY_gcs_rpc_server_reconnect_timeout_s=30"
    environ = ["env", "--unset=RAY_ADDRESS", f"RAY_TMPDIR={tmp_path.parent}", patience]
    text = SMALL.replace('runtime = "inline"', 'runtime = "ray"')
    process = lab.start("steps=1000", text=text, prefix=[*environ, *CONTAINER, *AS_PROCESS_1])
    process.until(lambda: steps_done(lab.run) >= 2, "its second step")
    return process


def server(process: Process, name: str) -> psutil.Process:
    return next(each for each in process.workers() if each.name() == name)


def error_of(process: Process, lab: Laboratory) -> str:
    """The only one, which is in the run folder too."""
    assert process.wait() == 1, process.text()
    (error,) = [line for line in process.text().splitlines() if line.startswith("rollart: error: ")]
    assert error.removeprefix("rollart: error: ") in summary(lab.run)["outcome"]
    assert error.removeprefix("rollart: error: ") in (lab.run / "run.log").read_text()
    return error


def test_the_death_of_the_raylet_under_a_run_ends_it_with_what_died_and_where_its_log_is(
    lab: Laboratory, tmp_path: Path
) -> None:
    process = start(lab, tmp_path)
    server(process, "raylet").kill()
    error = error_of(process, lab)
    assert "Ray's raylet on this machine has died" in error
    assert Path(error.rpartition("log: ")[2]).name == "raylet.out"


def test_the_death_of_the_gcs_ends_a_run_with_a_checkpoint_of_its_last_step(lab: Laboratory, tmp_path: Path) -> None:
    process = start(lab, tmp_path)
    server(process, "gcs_server").kill()
    assert "Ray's head does not answer any more: the GCS at 127.0.0.1:" in error_of(process, lab)
    (done,) = checkpoints(lab.run)
    assert done == steps_done(lab.run)
    assert f"go on from step {done} with: rollart train --resume {lab.run}" in process.text()
    check_audit(lab.run, done, alpha=1)
