"""Every config that is shipped is valid where its comment says it is run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.laboratory import REPOSITORY

pytestmark = pytest.mark.e2e

SMALL = ("steps=2", "rollout.groups_per_batch=4", "rollout.group_size=2")
CONFIGS = sorted([*REPOSITORY.glob("configs/*.toml"), *REPOSITORY.glob("examples/*.toml")])


@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.name)
def test_a_shipped_config_is_valid_and_checked_without_torch(config: Path) -> None:
    """One that is of a cluster which is not there is simulated."""
    modelled = "[simulate]" in config.read_text()
    words = ["simulate", config.name, *SMALL] if modelled else ["check", config.name]
    program = (
        "import sys; from rollart.cli import main; code = main(); assert 'torch' not in sys.modules; sys.exit(code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, *words],
        cwd=config.parent,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert ("step time" if modelled else "slots") in done.stdout
