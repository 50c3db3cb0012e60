"""The simulator against reality: one small workload, run for real and simulated, under all five schedules.

Real: `rollart train` as a user calls it, with engines that keep to the pace of an H800 and an H20 (`engine =
"emulated"`: real generation of a tiny model, slowed down to the roofline of an 8B model), environments that really
sleep, real training, wall clock. Simulated: `rollart profile` turns one of these runs (that of Sync+, which aborts
nothing, so that its trajectories stand for all) into a profile, and `rollart simulate` runs the same config with it,
for every schedule. Nothing else passes from one to the other.

The figure is seconds per step, without the first ones. `error` is simulated over real, minus 1; the aim is within 15 %
for every schedule, and the same order.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parents[2])]

from report import parser, publish

SCHEDULES = ("sync", "sync_plus", "one_off", "areal", "rollart")
WARMUP = 2

CONFIG = """
schedule = "{schedule}"
steps = {steps}
seed = 1
engine = "emulated"
affinity = {{ explore = "H800", solve = "H20" }}

[tasks.explore]
env = "synthetic"
max_turn_tokens = 6
max_tokens = 2048
options.turns_mean = 3
options.turns_max = 6
options.words = 24
options.reset_latency_s = 1.0
options.step_latency_s = 0.5
options.latency_tail = "lognormal"
options.latency_sigma = 0.8
options.per_member = true

[tasks.solve]
env = "synthetic"
max_turn_tokens = 48
max_tokens = 2048
options.turns_mean = 1
options.turns_max = 1
options.words = 4

[pools.H800]
count = 1
device = "cpu"
[pools.H20]
count = 1
device = "cpu"

[roles.actor_gen]
workers = {{ H800 = 1, H20 = 1 }}
[roles.actor_train]
device_class = "CPU"

[rollout]
groups_per_batch = 8
group_size = 8
zero_variance = "keep"
engine_slots = 64
max_model_tokens = 2048
env_threads = 256

[train]
learning_rate = 1e-5

[eval]
every = 0
episodes = 1

[log]
folder = "{folder}"
name = "{schedule}"
trajectories_every = 1
trajectories = 64
checkpoint_every = 0
tensorboard = false
"""


def real(schedule: str, steps: int, folder: Path) -> tuple[Path, list[float]]:
    """One run by the wall clock: its config, and the seconds of each step."""
    config = folder / f"{schedule}.toml"
    config.write_text(CONFIG.format(schedule=schedule, steps=steps, folder=folder), encoding="utf-8")
    _rollart("train", str(config))
    lines = [json.loads(line) for line in (folder / schedule / "metrics.jsonl").read_text().splitlines()]
    return config, [line["step_seconds"] for line in lines if "step_seconds" in line]


def simulated(config: Path, profile: Path, seeds: int) -> list[float]:
    """The same config in virtual time: the mean step under several seeds."""
    found = []
    for seed in range(seeds):
        out = config.with_suffix(f".{seed}.json")
        words = (f"simulate.profile={profile}", f"simulate.warmup_steps={WARMUP}", f"seed={seed}")
        _rollart("simulate", str(config), *words, "--json", str(out))
        found.append(json.loads(out.read_text())["step_s"])
    return found


def _rollart(*words: str) -> None:
    done = subprocess.run([sys.executable, "-m", "rollart", *words], capture_output=True, text=True, timeout=1800)
    if done.returncode:
        raise SystemExit(f"rollart {' '.join(words)}: {done.stderr}")


def main() -> None:
    """Run all schedules both ways and report."""
    options = parser(__doc__)
    options.add_argument("--steps", type=int, help="training steps per real run (default 16; quick 5)")
    arguments = options.parse_args()
    steps, seeds = arguments.steps or (5 if arguments.quick else 16), 1 if arguments.quick else 5
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        runs = {schedule: real(schedule, steps, folder) for schedule in SCHEDULES}
        profile = folder / "profile.toml"
        _rollart("profile", str(folder / "sync_plus"), "--out", str(profile))
        rows = []
        for schedule, (config, seconds) in runs.items():
            measured = statistics.mean(seconds[WARMUP:])
            modelled = statistics.mean(simulated(config, profile, seeds))
            error = modelled / measured - 1
            rows.append({"schedule": schedule, "real_s": measured, "simulated_s": modelled, "error": error})
    same = _order(rows, "real_s") == _order(rows, "simulated_s")
    summary = {"worst_error": max(abs(row["error"]) for row in rows), "same_order": float(same)}
    publish("paper/validation", rows, summary, arguments.json, packages=("torch", "transformers"))


def _order(rows: list[dict[str, float | str]], key: str) -> list[str]:
    return [str(row["schedule"]) for row in sorted(rows, key=lambda row: float(row[key]))]


if __name__ == "__main__":
    main()
