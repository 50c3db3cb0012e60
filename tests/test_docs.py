"""The documents' programs run, and print what the documents say."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from rollart.config import parse

ROOT = Path(__file__).parents[1]
PROGRAM = re.compile(r"```python\n(.*?)```\n+prints\n+```text\n(.*?)```", re.DOTALL)
TOML = re.compile(r"```toml\n(.*?)```", re.DOTALL)


def found(pattern: re.Pattern[str]) -> list[tuple[str, str]]:
    return [
        (path.name, match) for path in sorted(ROOT.glob("docs/*.md")) for match in pattern.findall(path.read_text())
    ]


@pytest.mark.parametrize(("name", "block"), found(PROGRAM))
def test_a_program_prints_what_its_document_says(name: str, block: tuple[str, str], tmp_path: Path) -> None:
    code, expected = block
    path = tmp_path / "program.py"
    path.write_text(code)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, path], env=environment, capture_output=True, text=True, check=False)
    assert (done.stdout, done.returncode) == (expected, 0), done.stderr


@pytest.mark.parametrize(("name", "text"), found(TOML))
def test_a_config_in_a_document_is_valid(name: str, text: str) -> None:
    parse(text if "[tasks." in text else f"{text}\n[tasks.frozenlake]\n")


def test_there_are_programs_and_configs_to_check() -> None:
    assert len(found(PROGRAM)) >= 2
    assert len(found(TOML)) >= 2
