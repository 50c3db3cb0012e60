"""All experiments of the paper: tables, benchmarks/paper/results.json, and figures in benchmarks/out/paper/."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
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


def _experiment(name: str) -> Callable[[Settings], list[Row]]:
    """Of the script beside this one, whatever else has its name."""
    spec = importlib.util.spec_from_file_location(f"paper_{name}", HERE / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    experiment: Callable[[Settings], list[Row]] = module.experiment
    return experiment


def _run(name: str, settings: Settings) -> tuple[str, list[Row], float]:
    began = time.monotonic()
    rows: list[Row] = _experiment(name)(settings)
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
        for done in as_completed([pool.submit(_run, name, settings) for name in arguments.only]):
            name, rows, seconds = done.result()
            found[name] = rows
            ordered = {each: found[each] for each in EXPERIMENTS if each in found}
            arguments.json.write_text(json.dumps(ordered | {"_": environment()}, indent=2) + "\n", encoding="utf-8")
            publish(f"paper/{name}", [flat(row) for row in rows], {"seconds_to_simulate": seconds})
            figure(name, rows, arguments.figures / f"{name}.png")
    print(f"wrote {arguments.json} and {arguments.figures}", file=sys.stderr)


def _kept(path: Path, asked: list[str]) -> dict[str, list[Row]]:
    """What the file has of the experiments that are not asked for."""
    before = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return {name: before[name] for name in EXPERIMENTS if name in before and name not in asked}


if __name__ == "__main__":
    main()
