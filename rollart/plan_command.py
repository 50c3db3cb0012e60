"""The options of `rollart plan`, and what they ask for.

Invariant: what is wrong with an option is said before anything else is done. What this file leaves out: the search.
"""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from msgspec import Struct

from rollart.schedule import SCHEDULES

Objective = Literal["throughput", "cost"]


class Allowance(Struct, frozen=True, kw_only=True):
    """What a plan may take.

    budget: cost per hour, default that of the config's own pools. devices: exactly so many per class instead.
    max_alpha: default the config's own alpha. schedules: default the config's own.
    """

    budget: float | None = None
    devices: Mapping[str, int] | None = None
    max_alpha: float | None = None
    schedules: tuple[str, ...] = ()


class Order(Struct, frozen=True, kw_only=True):
    """A search. `source`: the config's name; out, json: files to write."""

    source: str
    out: Path
    allowed: Allowance
    objective: Objective = "throughput"
    trials: int = 100
    top: int = 5
    jobs: int = 1
    json: Path | None = None


def add_options(parser: argparse.ArgumentParser, words: Mapping[str, Any]) -> None:
    """All of `rollart plan`; `words`: how the config and its overrides are taken."""
    add, budget = parser.add_argument, parser.add_mutually_exclusive_group()
    add("words", **words)
    budget.add_argument("--budget", metavar="COST", type=_positive, help="of all pools an hour (default: as they are)")
    budget.add_argument("--devices", metavar="CLASS=N,...", type=_devices, help="exactly these devices instead")
    add("--objective", choices=("throughput", "cost"), default="throughput", help="trained tokens per second, or cost")
    add("--max-alpha", metavar="ALPHA", type=_positive, help="greatest alpha of a plan (default: the config's)")
    add("--schedules", metavar="NAME,...", type=_schedules, default=(), help="others to try too, such as areal; or all")
    add("--trials", metavar="N", type=_count, default=100, help="simulations in all (default: 100)")
    add("--top", metavar="N", type=_count, default=5, help="plans to print (default: 5)")
    add("--jobs", metavar="N", type=_count, default=len(os.sched_getaffinity(0)), help="processes (default: the cores)")
    add("--out", metavar="FILE", type=Path, help="the best as a config (default: CONFIG-plan.toml, in this folder)")
    add("--json", metavar="FILE", type=Path, help="write all plans with their simulations as JSON")


def order(options: argparse.Namespace, source: str) -> Order:
    """What the options ask for, of the config named `source`."""
    return Order(
        source=source,
        out=options.out or Path(f"{Path(source).stem}-plan.toml"),
        allowed=Allowance(
            budget=options.budget, devices=options.devices, max_alpha=options.max_alpha, schedules=options.schedules
        ),
        objective=options.objective,
        trials=options.trials,
        top=options.top,
        jobs=options.jobs,
        json=options.json,
    )


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return value


def _count(text: str) -> int:
    if not text.isascii() or not text.isdigit() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def _devices(text: str) -> dict[str, int]:
    found = {}
    for part in text.split(","):
        name, _, number = part.partition("=")
        if not name or not number.isascii() or not number.isdigit():
            raise argparse.ArgumentTypeError(f"{text!r} are not devices per class, such as H800=96,H20=32")
        found[name.strip()] = int(number)
    return found


def _schedules(text: str) -> tuple[str, ...]:
    names = tuple(SCHEDULES) if text == "all" else tuple(text.split(","))
    for name in names:
        if name not in SCHEDULES:
            raise argparse.ArgumentTypeError(f"{name!r} is not a schedule; choose from {', '.join(SCHEDULES)}, or all")
    return names
