"""All experiments of the paper: tables, benchmarks/paper/results.json, and figures in benchmarks/out/paper/."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from common import HERE, Row, Settings, add_settings, chosen, environment, figure, flat
from report import publish

EXPERIMENTS = (
    "calibration",
    "ladder",
    "scaling",
    "affinity",
    "latency",
    "rewards",
    "staleness",
    "redundancy",
    "disaggregation",
    "weights",
)


def _run(name: str, settings: Settings) -> tuple[str, list[Row], float]:
    began = time.monotonic()
    rows: list[Row] = importlib.import_module(name).experiment(settings)
    return name, rows, time.monotonic() - began


def main() -> None:
    """Run them, print and write."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--json", type=Path, default=HERE / "results.json")
    options.add_argument("--figures", type=Path, default=HERE.parent / "out" / "paper")
    options.add_argument("--only", type=lambda text: text.split(","), default=list(EXPERIMENTS), metavar="A,B")
    options.add_argument("--jobs", type=int, default=os.cpu_count())
    add_settings(options)
    arguments = options.parse_args()
    settings = chosen(arguments)
    found = _kept(arguments.json, arguments.only)
    with ProcessPoolExecutor(arguments.jobs) as pool:
        for name, rows, seconds in pool.map(_run, arguments.only, [settings] * len(arguments.only)):
            found[name] = rows
            arguments.json.write_text(json.dumps(found | {"_": environment()}, indent=2) + "\n", encoding="utf-8")
            publish(f"paper/{name}", [flat(row) for row in rows], {"seconds_to_simulate": seconds})
            figure(name, rows, arguments.figures / f"{name}.png")
    print(f"wrote {arguments.json} and {arguments.figures}", file=sys.stderr)


def _kept(path: Path, asked: list[str]) -> dict[str, list[Row]]:
    """What the file has of the experiments that are not asked for."""
    before = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return {name: before[name] for name in EXPERIMENTS if name in before and name not in asked}


if __name__ == "__main__":
    main()
