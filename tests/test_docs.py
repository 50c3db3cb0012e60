"""What the documents show can be done: programs run and print what is said, configs are valid, commands exist."""

from __future__ import annotations

import ast
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from rollart.arguments import parsers
from rollart.cli import main
from rollart.config import parse

ROOT = Path(__file__).parents[1]
TEXTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/*.md"))]
PROGRAM = re.compile(r"```python\n(.*?)```\n+prints\n+```text\n(.*?)```", re.DOTALL)
PYTHON = re.compile(r"```python\n(.*?)```", re.DOTALL)
TOML = re.compile(r"```toml\n(.*?)```", re.DOTALL)
CHECKED = re.compile(r"```toml\n([^`]*)```\n+`rollart check` prints what follows: `([^`]+)`")
COMMAND = re.compile(r"^(?: {4})?(?:\$ )?(?:[\w./-]*/)?rollart ([a-z-]+ .+?)(?:\s{3,}.*|\s+#.*)?$", re.MULTILINE)


def found(pattern: re.Pattern[str]) -> list[tuple[str, str]]:
    return [(path.name, match) for path in TEXTS for match in pattern.findall(path.read_text())]


def is_program(code: str) -> bool:
    """Whether it stands alone: it begins with what it needs, and waits for nothing outside a function."""
    if not code.startswith(("import ", "from ", "# ")):
        return False
    try:
        ast.parse(code)
        compile(code, "document", "exec")
    except SyntaxError:
        return False
    return True


def run(code: str, folder: Path) -> subprocess.CompletedProcess[str]:
    path = folder / "program.py"
    path.write_text(code)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run([sys.executable, path], env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(("name", "block"), found(PROGRAM))
def test_a_program_prints_what_its_document_says(name: str, block: tuple[str, str], tmp_path: Path) -> None:
    code, expected = block
    done = run(code, tmp_path)
    assert (done.stdout, done.returncode) == (expected, 0), done.stderr


@pytest.mark.parametrize(("name", "code"), found(PYTHON))
def test_python_in_a_document_is_python_and_runs_where_it_stands_alone(name: str, code: str, tmp_path: Path) -> None:
    compile(code, name, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    if is_program(code):
        done = run(code, tmp_path)
        assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("name", "text"), found(TOML))
def test_a_config_in_a_document_is_valid(name: str, text: str) -> None:
    parse(text if "[tasks." in text else f"{text}\n[tasks.frozenlake]\n")


@pytest.mark.parametrize(("name", "block"), found(CHECKED))
def test_check_prints_what_a_document_says_follows_from_its_config(
    name: str, block: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text, line = block
    config = tmp_path / "config.toml"
    config.write_text(f"{text}\n[tasks.frozenlake]\n")
    assert main(["check", str(config)]) == 0
    assert f"  {line}\n" in capsys.readouterr().out


@pytest.mark.parametrize(("name", "line"), found(COMMAND))
def test_a_command_in_a_document_can_be_typed(name: str, line: str) -> None:
    _, unknown = parsers()[0].parse_known_args(shlex.split(line, comments=True))
    assert not [word for word in unknown if word.startswith("-")]


def test_there_is_something_to_check() -> None:
    assert len(found(PROGRAM)) >= 2
    assert len([code for _, code in found(PYTHON) if is_program(code)]) >= 5
    assert len(found(TOML)) >= 20
    assert len(found(COMMAND)) >= 15
    assert len(found(CHECKED)) >= 1
