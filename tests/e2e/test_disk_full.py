"""A disk that is full while a run writes its folder costs what cannot be written, and nothing else."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from rollart.checkpoint import Checkpoints
from tests.e2e.laboratory import SMALL, Laboratory, check_audit, lines

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

NAMESPACES = (["unshare", "--mount"], ["unshare", "--mount", "--user", "--map-root-user"])
STEPS = 30


@pytest.fixture
def namespace(tmp_path: Path) -> list[str]:
    """A command that runs another where file systems can be mounted."""
    for command in NAMESPACES:
        if shutil.which("unshare"):
            done = subprocess.run([*command, "mount", "-t", "tmpfs", "tmpfs", tmp_path], capture_output=True)
            if done.returncode == 0:
                return command
    pytest.skip("no file system can be mounted: neither as this user nor in a user namespace (unshare, mount)")


def test_a_run_goes_on_with_weights_in_its_folder_when_shared_memory_is_full(
    lab: Laboratory, namespace: list[str]
) -> None:
    task = """
[tasks.fills_disk]
env = "tests.e2e.hostile:FillsDisk"
options = { place = "/dev/shm", fill = [20], free = [] }
max_turn_tokens = 4
"""
    process = lab.start(
        *("runtime=local", "tasks.friendly.weight=0", "steps=10", "rollout.zero_variance=keep"),
        text=SMALL + task,
        prefix=[*namespace, "sh", "-c", 'mount -t tmpfs -o size=32m tmpfs /dev/shm && "$0" "$@"'],
    )
    assert process.wait() == 0, process.text()
    (line,) = [line for line in process.text().splitlines() if "weights: " in line]
    assert re.search(r"no room for version (\d+) in /dev/shm/.*; from version \1 on, they go through files in", line)
    assert line.endswith(f"{lab.run}/weights/spare")
    check_audit(lab.run, steps=10, alpha=1)
    assert list((lab.run / "weights").iterdir()) == []


def test_a_run_goes_on_over_a_disk_that_is_full_for_a_while_and_again_at_the_end(
    lab: Laboratory, namespace: list[str]
) -> None:
    disk, copy = lab.folder / "disk", lab.folder / "copy"
    disk.mkdir()
    task = f"""
[tasks.fills_disk]
env = "tests.e2e.hostile:FillsDisk"
options = {{ place = {json.dumps(str(disk))}, fill = [20, 130], free = [80] }}
max_turn_tokens = 4
"""
    mount = 'mount -t tmpfs -o size=8m tmpfs "$0" && "$@"; code=$?; cp -r "$0/runs" "$0/../copy"; exit $code'
    process = lab.start(
        *("tasks.friendly.weight=0", f"steps={STEPS}", "log.checkpoint_every=2", "rollout.zero_variance=keep"),
        *("log.tensorboard=true", "log.trajectories_every=1", f"log.folder={json.dumps(str(disk / 'runs'))}"),
        text=SMALL + task,
        prefix=[*namespace, "sh", "-c", mount, str(disk)],
    )
    assert process.wait() == 0, process.text()
    text = process.text()
    for name in ("metrics.jsonl", "trajectories"):
        complaint = f"warning: {disk}/runs/{lab.name}/{name}: cannot be written: No space left on device"
        assert text.count(complaint) == 2, "one warning each time the disk fills up"
    assert "warning: checkpoint" in text
    assert "metrics.jsonl: can be written again; 0 records were lost" in text
    assert f"done: {disk}/runs/{lab.name}, without a summary" in text
    run = copy / lab.name
    for name in ("batches.jsonl", "metrics.jsonl"):
        steps = [line["step"] for line in lines(run / name) if "groups" in line or "train/loss" in line]
        assert 3 < len(steps) <= STEPS
        assert steps == list(range(1, len(steps) + 1)), "what waited for room was written when there was some"
    kept = Checkpoints(run / "checkpoints", kept=9)
    assert [kept.read(step).step for step in kept.steps()] == kept.steps()
    assert len(kept.steps()) >= 1, "those before the disk was full are still there, and whole"
    assert all((kept.trainer_folder(step) / "model.safetensors").stat().st_size for step in kept.steps())
    assert not list(run.rglob("*.tmp"))
    assert not list(run.rglob("*.part"))
