"""The five schedules in wall-clock time, on environments with heavy-tailed latency.

Each run is `rollart train` as a user calls it: real processes, real generation with the tiny model, real training, and
environments that really sleep (`synthetic`: log-normal delays per step and reset, drawn per episode) beside one that
answers at once (`sorting`). Only the config's `schedule` differs. The figure is trained trajectories per second
between the end of the first step and the end of the last one, so that start-up, the first batch (which no schedule can
overlap with anything) and the evaluations are left out. Runs are repeated in rotating order; a row shows the median.
`sync` is the baseline: the summary gives each other schedule's throughput over it.

AReaL and RollArt run with alpha = 1 and the same slots; they differ in whether a trajectory that grew too old is ended
at once or at its end. How much each schedule gains depends on the latency (`--latency`, mean seconds per step).
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from report import parser, publish

SCHEDULES = ("sync", "sync_plus", "one_off", "areal", "rollart")

CONFIG = """
schedule = "{schedule}"
steps = {steps}
seed = {seed}

[tasks.slow]
env = "synthetic"
weight = 3
max_turns = 6
options.turns_mean = 4
options.turns_max = 6
options.reset_latency_s = {latency}
options.step_latency_s = {latency}
options.latency_tail = "lognormal"
options.latency_sigma = 1.2
options.per_member = true

[tasks.sorting]
weight = 1

[rollout]
groups_per_batch = 8
group_size = 8
zero_variance = "keep"
env_threads = 256

[train]
learning_rate = 1e-4

[eval]
every = 0
episodes = 1

[log]
folder = "{folder}"
name = "{name}"
trajectories_every = 0
checkpoint_every = 0
tensorboard = false
"""


def run(schedule: str, steps: int, latency: float, seed: int, folder: Path) -> dict[str, float]:
    """One training run; its throughput and what `summary.json` says of overlap and waste."""
    name = f"{schedule}-{seed}"
    config = folder / f"{name}.toml"
    config.write_text(
        CONFIG.format(schedule=schedule, steps=steps, latency=latency, seed=seed, folder=folder, name=name),
        encoding="utf-8",
    )
    subprocess.run(
        [sys.executable, "-m", "rollart", "train", str(config)], check=True, stdout=subprocess.DEVNULL, timeout=900
    )
    lines = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
    ends = [line["time"] for line in lines if "train/loss" in line]
    kept = [line["trajectories/kept"] for line in lines if "train/loss" in line]
    summary = json.loads((folder / name / "summary.json").read_text())
    ages = summary["age_histogram"]
    return {
        "trajectories_per_s": sum(kept[1:]) / (ends[-1] - ends[0]),
        "overlap": summary["overlap"],
        "aborted": sum(summary["aborted"].values()),
        "mean_age": sum(int(age) * count for age, count in ages.items()) / sum(ages.values()),
    }


def main() -> None:
    """Run all schedules and report."""
    options = parser(__doc__)
    options.add_argument("--steps", type=int, help="training steps per run (default 20; quick 6)")
    options.add_argument("--repetitions", type=int, help="runs per schedule (default 3; quick 1)")
    options.add_argument("--latency", type=float, default=0.3, help="mean seconds per environment call (default 0.3)")
    arguments = options.parse_args()
    steps = arguments.steps or (6 if arguments.quick else 20)
    repetitions = arguments.repetitions or (1 if arguments.quick else 3)
    results: dict[str, list[dict[str, float]]] = {schedule: [] for schedule in SCHEDULES}
    with tempfile.TemporaryDirectory() as folder:
        for repetition in range(repetitions):
            for place in range(len(SCHEDULES)):
                schedule = SCHEDULES[(place + repetition) % len(SCHEDULES)]
                results[schedule].append(run(schedule, steps, arguments.latency, repetition, Path(folder)))
    rows = [
        {
            "schedule": schedule,
            **{key: statistics.median(each[key] for each in runs) for key in runs[0]},
            "runs": ", ".join(f"{each['trajectories_per_s']:.1f}" for each in runs),
        }
        for schedule, runs in results.items()
    ]
    base = rows[0]["trajectories_per_s"]
    summary = {row["schedule"]: row["trajectories_per_s"] / base for row in rows[1:]}
    publish("schedules", rows, summary, arguments.json, packages=("torch", "transformers"))


if __name__ == "__main__":
    main()
