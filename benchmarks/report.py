"""What every benchmark shares: the options, a table for people, a JSON file for machines.

`--quick` makes a run small enough for continuous integration; `--json FILE` writes one object with `name`, `machine`,
`versions`, `command`, `rows` (the table) and `summary` (flat: figure name -> number). Figures are named in `summary`
alone, so that whoever compares two runs needs to read nothing else.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

Row = Mapping[str, Any]


def parser(description: str | None) -> argparse.ArgumentParser:
    """An argument parser with the two shared options."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--json", type=Path, metavar="FILE", help="write the report here")
    made.add_argument("--quick", action="store_true", help="a small run, for continuous integration")
    return made


def publish(
    name: str,
    rows: Sequence[Row],
    summary: Mapping[str, float],
    json_file: Path | None = None,
    packages: Sequence[str] = (),
) -> None:
    """Print the table and the summary; write the JSON file if one is asked for."""
    console = Console() if sys.stdout.isatty() else Console(width=160)
    console.print(_table(name, rows))
    for key, value in summary.items():
        console.print(f"{key} = {_shown(value)}")
    if json_file is not None:
        report = {
            "name": name,
            "machine": machine(),
            "versions": versions(("rollart", *packages)),
            "command": sys.argv,
            "rows": [dict(row) for row in rows],
            "summary": dict(summary),
        }
        json_file.parent.mkdir(parents=True, exist_ok=True)
        json_file.write_text(json.dumps(report, indent=2, allow_nan=False) + "\n", encoding="utf-8")


def machine() -> dict[str, Any]:
    """What the figures depend on: processor, cores, system and how busy it is."""
    return {
        "system": platform.platform(),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "load": list(os.getloadavg()) if hasattr(os, "getloadavg") else None,
    }


def versions(packages: Sequence[str]) -> dict[str, str]:
    """Python's version and those of the packages; `not installed` where one is run from its source."""
    found = {"python": platform.python_version()}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")


def _table(name: str, rows: Sequence[Row]) -> Table:
    table = Table(title=name)
    for column in dict.fromkeys(key for row in rows for key in row):
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(*(_shown(row.get(column.header, "")) for column in table.columns))
    return table


def _shown(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
