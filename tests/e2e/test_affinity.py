"""A run that finds out by itself which of two emulated device classes suits which task."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rollart.cli import main

pytestmark = pytest.mark.e2e

CONFIG = """
steps = 8
runtime = "inline"
engine = "emulated"
affinity = "auto"
[pools.H800]
device = "cpu"
count = 2
[pools.H20]
device = "cpu"
count = 2
[tasks.explore]
env = "synthetic"
max_turn_tokens = 2
options = { turns_min = 3, turns_max = 3, words = 30 }
[tasks.solve]
env = "synthetic"
max_turn_tokens = 16
options = { turns_min = 1, turns_max = 1 }
[rollout]
groups_per_batch = 8
group_size = 4
zero_variance = "keep"
[eval]
every = 0
episodes = 1
[log]
checkpoint_every = 0
tensorboard = false
"""


def test_a_run_says_what_it_measured_on_each_class_and_why_it_chose(tmp_path: Path) -> None:
    config = tmp_path / "auto.toml"
    config.write_text(CONFIG)
    assert main(["train", str(config), f"log.folder={tmp_path}/runs", "log.name=auto"]) == 0
    folder = tmp_path / "runs" / "auto"
    affinity = json.loads((folder / "summary.json").read_text())["affinity"]
    assert affinity["mode"] == "auto"
    assert set(affinity["mapping"].values()) <= {"H800", "H20"}
    for task in ("explore", "solve"):
        assert set(affinity["profile"][task]["on"]) == {"H800", "H20"}
        assert all(there["prefill_s"] > 0 < there["decode_s"] for there in affinity["profile"][task]["on"].values())
    assert affinity["profile"]["explore"]["prefix_hit_rate"] > 0
    said = [line for line in (folder / "run.log").read_text().splitlines() if " affinity: " in line]
    assert len(said) == len(affinity["changes"]) >= 2
    assert affinity["unmeasured"] <= 2, "only what had all its tokens as it was sent on"
