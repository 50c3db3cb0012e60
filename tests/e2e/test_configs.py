"""Every config that is shipped is valid where its comment says it is run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.laboratory import REPOSITORY

pytestmark = pytest.mark.e2e

CONFIGS = sorted([*REPOSITORY.glob("configs/*.toml"), *REPOSITORY.glob("examples/*.toml")])


@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.name)
def test_a_shipped_config_is_valid_and_checked_without_torch(config: Path) -> None:
    program = (
        "import sys; from rollart.cli import main; code = main(); assert 'torch' not in sys.modules; sys.exit(code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, "check", config.name],
        cwd=config.parent,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert "slots" in done.stdout
