"""What the experiments of benchmarks/paper share: the paper's set-up as a config, one way to run it, one way to report.

Every experiment is a function of `Settings` that gives rows: what was set, `measured`, and `published` (a number, a
range of two over the paper's models, or None where the paper gives none). One calibration serves all: the profile
`paper` of rollart, fitted only to what the paper gives for calibration. Nothing is tuned per experiment.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parents[2])]

from report import machine, publish, versions

from rollart.config import Config, from_dict
from rollart.data.simulated.profile import Profile, load_profile
from rollart.simulation import Simulation
from rollart.simulator import simulate

HERE = Path(__file__).resolve().parent
COST = {"H800": 2.85, "H20": 1.0}
PREFILL_HEAVY = ("swe_bench", "webshop", "frozenlake")
DECODE_HEAVY = ("gem_math", "gem_game")
TENSOR_PARALLEL = {"Qwen3-8B": 1, "Qwen3-14B": 2, "Qwen3-32B": 4, "Qwen3-30B-A3B": 2}
JUDGED = "gem_math"
"""The task whose reward needs a device."""
PATIENCE = {"reset_timeout_s": 1200.0, "step_timeout_s": 120.0}
"""A reset may take hundreds of seconds (paper, section 7), and is waited for."""
Row = dict[str, Any]


@dataclass(frozen=True)
class Settings:
    """What an experiment may be asked to change. The defaults are the paper's (which means five iterations, too)."""

    model: str = "Qwen3-8B"
    pools: Mapping[str, int] = field(default_factory=lambda: {"H800": 96, "H20": 32})
    train: Mapping[str, int] = field(default_factory=lambda: {"H800": 32})
    groups: int = 64
    members: int = 8
    alpha: float = 1.0
    steps: int = 5
    warmup: int = 1
    seed: int = 0
    profile: str = "paper"
    tasks: tuple[str, ...] = ()

    @property
    def mixture(self) -> tuple[str, ...]:
        """Tasks, sampled uniformly; SWE-bench is trained on 32B only (paper, section 7)."""
        if self.tasks:
            return self.tasks
        small = (*PREFILL_HEAVY[1:], *DECODE_HEAVY)
        return ("swe_bench", *small) if self.model == "Qwen3-32B" else small


def config(settings: Settings, schedule: str, **changes: Any) -> Config:
    """The paper's set-up for a schedule. `changes`: dotted keys with '__' for '.', such as rollout__extra_groups=2.

    Sync and Sync+ share all devices between rollout and training, in turn; the others set those of `settings.train`
    apart. Only Sync scores on local devices: eight of those that it has anyway, once the rollout is over; the paper
    does not say how many. Only RollArt declares an affinity and moves weights asynchronously (section 7, baselines).
    """
    parallel = TENSOR_PARALLEL.get(settings.model, 1)
    in_turn = schedule in ("sync", "sync_plus")
    left = {
        name: count - (0 if in_turn else settings.train.get(name, 0))
        for name, count in settings.pools.items()
        if count - (0 if in_turn else settings.train.get(name, 0)) >= parallel
    }
    trained_on = dict(settings.pools if in_turn else settings.train)
    (train_class, train_count), *_ = sorted(trained_on.items(), key=lambda item: -item[1])
    wide = next(size for size in (8, 4, 2, 1) if train_count % size == 0)
    data: dict[str, Any] = {
        "seed": settings.seed,
        "steps": settings.steps + settings.warmup,
        "schedule": schedule,
        "tasks": {name: dict(PATIENCE) for name in settings.mixture},
        "pools": {
            name: {
                "count": count,
                "cost": COST.get(name, 1.0),
                "share": {"sync": 3, "sync_plus": 2}.get(schedule, 1),
                "compatible": [other for other in settings.pools if other != name],
            }
            for name, count in settings.pools.items()
        },
        "roles": {
            "actor_train": {"device_class": train_class, "workers": train_count // wide, "devices": wide},
            "actor_gen": {"workers": {name: count // parallel for name, count in left.items()}, "devices": parallel},
        },
        "rollout": {
            "groups_per_batch": settings.groups,
            "group_size": settings.members,
            "max_model_tokens": 32768,
            "engine_slots": 256,
            "zero_variance": "keep",
        },
        "weights": {"asynchronous": schedule == "rollart"},
        "simulate": {"model": settings.model, "profile": settings.profile, "warmup_steps": settings.warmup},
    }
    _set_rewards(data, schedule, train_class)
    if schedule in ("areal", "rollart"):
        data["alpha"] = settings.alpha
    if schedule == "rollart" and len(left) > 1:
        data["affinity"] = affinity(settings.mixture)
    for key, value in changes.items():
        _set(data, key.split("__"), value)
    return from_dict(data)


def _set_rewards(data: dict[str, Any], schedule: str, device_class: str) -> None:
    if JUDGED in data["tasks"] and schedule != "sync":
        data["tasks"][JUDGED]["reward"] = "fc://judge"
    elif JUDGED in data["tasks"]:
        data["roles"]["reward"] = {"device_class": device_class, "workers": 8}


def affinity(tasks: Sequence[str]) -> dict[str, str]:
    """As the paper declares it: prefill-heavy tasks on H800, decode-heavy ones on H20."""
    return {task: "H800" if task in PREFILL_HEAVY else "H20" for task in tasks}


def homogeneous(settings: Settings, count: int = 128) -> Settings:
    """What the baselines get: H800 alone."""
    return replace(settings, pools={"H800": count})


def run(made: Config, profile: Profile | None = None) -> Simulation:
    """Simulate, saying so on stderr."""
    result = simulate(made, profile=profile)
    print(
        f"  {made.simulate.model if made.simulate else ''} {made.schedule}: {result.step_s:.1f} s per step, "
        f"{result.share_of_possible:.0%} of what is possible",
        file=sys.stderr,
    )
    return result


def changed(settings: Settings, **tasks: Any) -> Profile:
    """The profile with some fields of every task replaced."""
    from msgspec.structs import replace as with_fields

    profile = load_profile(settings.profile)
    return with_fields(profile, tasks={name: with_fields(task, **tasks) for name, task in profile.tasks.items()})


def details(result: Simulation) -> Row:
    """Where a step goes, who is busy, what is lost: enough to say why a figure is what it is."""
    return {
        "breakdown": {name: round(seconds, 1) for name, seconds in result.breakdown.items()},
        "utilisation": {name: round(share, 2) for name, share in result.utilisation.items()},
        "aborted": result.aborted,
        "tokens_per_step": round(result.tokens_per_step),
        "trajectories": {name: means["trajectories"] for name, means in result.trajectories.items()},
    }


def rollout_s(result: Simulation) -> float:
    """Seconds of a step in which the trainer waits for the rollout."""
    return sum(result.breakdown[stage] for stage in ("generate", "reset", "step", "score", "nothing_running"))


def main(name: str, description: str | None, experiment: Callable[[Settings], list[Row]]) -> None:
    """A script's command line: run, print the table, write JSON and a figure."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--json", type=Path, metavar="FILE")
    made.add_argument("--figure", type=Path, metavar="FILE", help="a bar chart, .png or .svg (needs matplotlib)")
    add_settings(made)
    options = made.parse_args()
    rows = experiment(chosen(options))
    publish(f"paper/{name}", [flat(row) for row in rows], {}, options.json)
    if options.json is not None:  # with ranges kept as they are
        report = json.loads(options.json.read_text())
        options.json.write_text(json.dumps(report | {"rows": rows}, indent=2) + "\n")
    if options.figure is not None:
        figure(name, rows, options.figure)


def add_settings(made: argparse.ArgumentParser) -> None:
    """The options that change `Settings`."""
    add = made.add_argument
    add("--model", help="Qwen3-8B, Qwen3-14B, Qwen3-32B, Qwen3-30B-A3B or a config.json")
    add("--pools", type=_devices, metavar="H800=96,H20=32", help="all devices")
    add("--train", type=_devices, metavar="H800=32", help="those that train, where training is set apart")
    add("--groups", type=int, help="groups per batch (default 64)")
    add("--members", type=int, help="members per group (default 8)")
    add("--alpha", type=float, help="bound on staleness (default 1)")
    add("--steps", type=int, help="steps measured (default 5)")
    add("--seed", type=int)
    add("--profile", help="a workload profile (default paper)")
    add("--tasks", type=lambda text: tuple(text.split(",")), metavar="A,B", help="tasks of the profile")


def chosen(options: argparse.Namespace) -> Settings:
    """The paper's settings with what was asked for."""
    names = ("model", "pools", "train", "groups", "members", "alpha", "steps", "seed", "profile", "tasks")
    given = {name: value for name in names if (value := getattr(options, name)) is not None}
    return replace(Settings(), **given)


def flat(row: Row) -> Row:
    """For the table: a range as text, and no details."""
    return {key: _range(value) if key == "published" else value for key, value in row.items() if key != "why"}


def _range(value: Any) -> str:
    if value is None:
        return "-"
    return "-".join(f"{each:g}" for each in value) if isinstance(value, list | tuple) else f"{value:g}"


def figure(name: str, rows: Sequence[Row], path: Path) -> None:
    """Bars of what was measured, with what was published as a mark or a range."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    shown = [row for row in rows if isinstance(row["measured"], int | float)]
    labels = [
        "\n".join(str(value) for key, value in row.items() if key not in ("measured", "published", "unit", "why"))
        for row in shown
    ]
    drawn, axes = pyplot.subplots(figsize=(max(6, 0.9 * len(shown)), 4.5), layout="constrained")
    axes.bar(range(len(shown)), [row["measured"] for row in shown], color="#4477aa", label="simulated")
    for place, row in enumerate(shown):
        if (published := row["published"]) is not None:
            low, high = published if isinstance(published, list | tuple) else (published, published)
            axes.plot([place, place], [low, high], color="#cc3311", linewidth=3, marker="_", markersize=16)
    axes.plot([], [], color="#cc3311", linewidth=3, label="published")
    axes.set_xticks(range(len(shown)), labels, fontsize=7)
    axes.set_ylabel(str(shown[0].get("unit", "ratio")) if shown else "")
    axes.set_title(name)
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    drawn.savefig(path, dpi=120)
    pyplot.close(drawn)


def environment() -> dict[str, Any]:
    """Machine and versions, for the common report."""
    return {"machine": machine(), "versions": versions(("rollart",)), "command": sys.argv}


def _set(data: dict[str, Any], path: Sequence[str], value: Any) -> None:
    table = data
    for name in path[:-1]:
        table = table.setdefault(name, {})
    table[path[-1]] = copy.deepcopy(value)


def _devices(text: str) -> dict[str, int]:
    try:
        return {name: int(count) for name, _, count in (part.partition("=") for part in text.split(","))}
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r}: write it as H800=96,H20=32") from error
