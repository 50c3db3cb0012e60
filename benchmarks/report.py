"""How every benchmark is called and what it leaves behind: a table, and one JSON file."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

PACKAGES = ("torch", "transformers", "msgspec", "numpy")


def arguments(description: str) -> argparse.ArgumentParser:
    """A parser with `--json FILE` and `--quick`."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--json", metavar="FILE", help="write the result here")
    parser.add_argument("--quick", action="store_true", help="small sizes, to see that it runs")
    return parser


def report(name: str, rows: list[dict[str, Any]], summary: dict[str, Any], json_path: str | None) -> None:
    """Print `rows` as a table and `summary` as lines; write both, with machine, versions and command."""
    table = Table(title=name)
    for column in rows[0] if rows else ():
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(*map(_text, row.values()))
    console = Console()
    console.print(table)
    for key, value in summary.items():
        console.print(f"{key} = {_text(value)}", highlight=False)
    if json_path:
        result = {
            "name": name,
            "machine": {"platform": platform.platform(), "processor": platform.processor(), "cpus": os.cpu_count()},
            "versions": {"python": platform.python_version(), **_versions()},
            "command": " ".join(sys.orig_argv),
            "rows": rows,
            "summary": summary,
        }
        Path(json_path).write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


def _versions() -> dict[str, str]:
    return {name: importlib.metadata.version(name) for name in PACKAGES if _installed(name)}


def _installed(name: str) -> bool:
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _text(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
