"""The layers of the package, as import-linter knows them from pyproject.toml, that the rules bite, and the rules of the
suite itself."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import settings

ROOT = Path(__file__).resolve().parents[1]


def lint(folder: Path) -> subprocess.CompletedProcess[str]:
    """import-linter over the package in `folder`, which stands before any installed one."""
    script = "import sys\nfrom importlinter.cli import lint_imports_command\nlint_imports_command(['--no-cache'])"
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script],
        cwd=folder,
        env={"PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    shutil.copytree(ROOT / "rollart", tmp_path / "rollart", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def test_every_module_keeps_to_its_layer() -> None:
    done = lint(ROOT)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("module", "statement", "complaint"),
    [
        ("control/extra.py", "def f():\n    import torch\n", "rollart.control.extra -> torch"),
        ("tasks/extra.py", "import rollart.learn.loss\n", "rollart.tasks.extra -> rollart.learn.loss"),
        ("rewards/extra.py", "import rollart.tasks\n", "rollart.rewards.extra -> rollart.tasks"),
        ("rewards/extra.py", "def f():\n    import torch\n", "rollart.rewards.extra -> torch"),
        ("control/extra.py", "import rollart.data\n", "rollart.control.extra -> rollart.data"),
        ("errors.py", "import rollart.config\n", "rollart.errors -> rollart.config"),
        ("data/extra.py", "def f():\n    import vllm\n", "rollart.data.extra -> vllm"),
        ("utils.py", "", "utils"),
    ],
)
def test_a_forbidden_import_is_found(module: str, statement: str, complaint: str, copy: Path) -> None:
    with (copy / "rollart" / module).open("a") as file:
        file.write(statement)
    done = lint(copy)
    assert done.returncode == 1
    assert complaint in done.stdout


def test_no_example_of_hypothesis_has_a_time_limit_or_depends_on_chance() -> None:
    for profile in (settings(), settings(max_examples=1)):
        assert profile.deadline is None
        assert profile.derandomize
