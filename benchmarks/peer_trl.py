"""`rollart` against TRL's `GRPOTrainer` on the same task, model, group size and batch, in one run on one CPU.

Two variants. `single`: sorting, one turn, through TRL's own generation. `multi`: FrozenLake as in the main job, up to 6
turns, through TRL's `rollout_func`, written as its users would write it at their best: all episodes of a batch advance
together and keep their KV cache between turns (`peer_trl_side.py`). Both sides read one config (below), so that
prompts, seeds, rewards, limits, sampling, learning rate, optimizer, clipping and the number of trained trajectories are
equal, and start from one folder of weights, warmed up once. TRL lives in a virtual environment of its own with the same
versions of torch and transformers as ours. It may use all cores: the fastest of some settings (threads, trajectories
per forward and backward pass) is found first and used (with --quick one thread, nothing tried). `rollart` runs as
`rollart train` does, one thread per process.

What is measured, for each side: seconds of wall and CPU time (all processes) from the first batch to the last optimizer
step, so without imports, loading of the model and warm-up; trained tokens, which are those under the loss mask; and the
mean reward of the last fifth of the trajectories. `total_wall_s` and `total_cpu_s` are those of the whole process.

    wall_ratio_*    TRL's wall seconds per trained token over ours
    cpu_ratio_*     the same for CPU seconds
    reward_ratio_*  our reward over TRL's; equal numbers of trajectories
    trl_*           the settings found for TRL

Each ratio is that of the medians of the repetitions; sides alternate, and each repetition has its own seed.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from report import parser, publish

from rollart.usage import Usage

HERE = Path(__file__).resolve().parent
VENV = HERE / ".venv-trl"
TRL = "1.16.0"
SAMPLE_S = 0.1

COMMON = """
schedule = "rollart"
alpha = 1

[rollout]
groups_per_batch = 16
group_size = 8
engine_slots = 128  # all of a batch at once, as TRL generates
zero_variance = "keep"  # TRL trains on every group

[train]
learning_rate = 5e-4

[eval]
every = 0
episodes = 1

[log]
tensorboard = false
trajectories_every = 0
checkpoint_every = 0
"""
TASKS = {
    "single": "[tasks.sorting]\noptions = { length = 5 }\n",
    "multi": "[tasks.frozenlake]\nmax_turns = 6\nmax_turn_tokens = 2\n"
    'options = { anywhere = true, view = "near", exact = true, invalid_ends = true, discount = 0.95 }\n',
}
STEPS = {"single": 60, "multi": 40}
QUICK_STEPS = 5
WARMUP = ["model.warmup_steps=150", "model.warmup_episodes=1000"]
MICRO_BATCHES = (32, 128)
CALIBRATION_STEPS = 3


@dataclass(frozen=True)
class Settings:
    """How TRL's side is run: torch's threads, and trajectories per forward and backward pass."""

    threads: int
    micro_batch: int


QUICK_SETTINGS = Settings(threads=1, micro_batch=32)


@dataclass(frozen=True)
class Cost:
    """What one side took for one run."""

    wall_s: float
    cpu_s: float
    trained_tokens: int
    trajectories: int
    rewards: list[float]
    total_wall_s: float
    total_cpu_s: float

    @property
    def last_reward(self) -> float:
        """Mean over the last fifth of the steps, each of which has as many trajectories."""
        return statistics.mean(self.rewards[-max(1, len(self.rewards) // 5) :])

    def row(self, variant: str, side: str, repetition: int) -> dict[str, Any]:
        """Of the table; `us` are microseconds per trained token."""
        return {
            "variant": variant,
            "side": side,
            "run": repetition,
            "wall_s": self.wall_s,
            "cpu_s": self.cpu_s,
            "tokens": self.trained_tokens,
            "wall_us": 1e6 * self.wall_s / self.trained_tokens,
            "cpu_us": 1e6 * self.cpu_s / self.trained_tokens,
            "reward": self.last_reward,
            "total_wall_s": self.total_wall_s,
            "total_cpu_s": self.total_cpu_s,
        }


# ------------------------------------------------------------------------------------------------------------ processes
@dataclass(frozen=True)
class Trace:
    """CPU seconds of a process and all that it started, over time in seconds since 1970."""

    times: list[float]
    cpu_s: list[float]

    @property
    def total(self) -> tuple[float, float]:
        """Wall and CPU seconds."""
        return self.times[-1] - self.times[0], self.cpu_s[-1] - self.cpu_s[0]

    def between(self, begin: float, end: float) -> float:
        """CPU seconds in an interval."""
        first, last = np.interp([begin, end], self.times, self.cpu_s)
        return float(last - first)


def run(command: Sequence[str | Path], folder: Path, threads: int) -> Trace:
    """Run to the end in `folder`, quietly; on failure show the end of its output and stop."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(HERE.parent),
        "OMP_NUM_THREADS": str(threads),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    usage, trace, log = Usage(), Trace([time.time()], [0.0]), folder / "output.log"
    with (
        log.open("w") as output,
        subprocess.Popen(command, cwd=folder, env=environment, stdout=output, stderr=subprocess.STDOUT) as process,
    ):
        ended = False
        while not ended:
            with contextlib.suppress(subprocess.TimeoutExpired):
                ended = process.wait(SAMPLE_S) is not None
            usage.sample()
            trace.times.append(time.time())
            trace.cpu_s.append(usage.cpu_s)
    if process.returncode:
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-20:])
        raise SystemExit(f"{' '.join(map(str, command))} failed:\n{tail}")
    return trace


def make_environment() -> None:
    """TRL's virtual environment, made once and again when a version changes; the stamp is written last."""
    ours = {name: version(name).partition("+")[0] for name in ("torch", "transformers", "gymnasium", "msgspec")}
    wanted = [f"trl=={TRL}", *(f"{name}=={number}" for name, number in ours.items())]
    stamp = VENV / "requirements.txt"
    if stamp.is_file() and stamp.read_text().split() == wanted:
        return
    print(f"Installing {', '.join(wanted)} into {VENV} (once, a few minutes)", flush=True)
    subprocess.run([sys.executable, "-m", "venv", "--clear", VENV], check=True)
    pip = [VENV / "bin" / "python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, *wanted], check=True)
    stamp.write_text("\n".join(wanted))


# ----------------------------------------------------------------------------------------------------------- both sides
@dataclass(frozen=True)
class Variant:
    """One comparison: its config, a scratch folder, and the weights that both sides start from."""

    name: str
    folder: Path
    steps: int
    model: Path

    @classmethod
    def prepare(cls, name: str, folder: Path, steps: int) -> Variant:
        """Write the config and warm up the weights, by a run whose one step of training changes next to nothing."""
        folder.mkdir()
        config = folder / "config.toml"
        config.write_text(COMMON.replace("\n[rollout]", f"\n{TASKS[name]}\n[rollout]"))
        still = ["steps=1", "train.learning_rate=1e-12", "log.name=warmup", *WARMUP]
        run([sys.executable, "-m", "rollart", "train", config, *still], folder, threads=1)
        return cls(name, folder, steps, folder / "runs" / "warmup" / "checkpoints" / "step-000001" / "trainer")

    def rollart(self, seed: int) -> Cost:
        """One run of `rollart train`."""
        name = f"seed-{seed}"
        words = [f"steps={self.steps}", f"seed={seed}", f"model.name={self.model}", f"log.name={name}"]
        trace = run([sys.executable, "-m", "rollart", "train", self._config, *words], self.folder, threads=1)
        folder = self.folder / "runs" / name
        summary = json.loads((folder / "summary.json").read_text())
        steps = [line for line in _lines(folder / "metrics.jsonl") if "train/tokens" in line]
        wall_s, end = sum(line["step_seconds"] for line in steps), steps[-1]["time"]
        return Cost(
            wall_s=wall_s,
            cpu_s=trace.between(end - wall_s, end),
            trained_tokens=summary["tokens"],
            trajectories=summary["trajectories"],
            rewards=[_mean_reward(line["groups"]) for line in _lines(folder / "batches.jsonl")],
            total_wall_s=trace.total[0],
            total_cpu_s=trace.total[1],
        )

    def trl(self, seed: int, settings: Settings, steps: int | None = None) -> Cost:
        """One run of TRL's side."""
        result = self.folder / f"trl-{seed}.json"
        options = ["--micro-batch", str(settings.micro_batch), "--threads", str(settings.threads), "--json", result]
        words = [f"steps={steps or self.steps}", f"seed={seed}", "--model", self.model, *options]
        side = HERE / "peer_trl_side.py"
        trace = run([VENV / "bin" / "python", side, self._config, *words], self.folder, settings.threads)
        took = json.loads(result.read_text())
        del took["versions"]
        return Cost(**took, total_wall_s=trace.total[0], total_cpu_s=trace.total[1])

    def fastest(self) -> Settings:
        """Of some settings of TRL's side, that with the fewest wall seconds per trained token."""
        threads = sorted({1, os.cpu_count() or 1})
        tried = {}
        for settings in [Settings(number, size) for number in threads for size in MICRO_BATCHES]:
            cost = self.trl(0, settings, CALIBRATION_STEPS)
            tried[settings] = cost.wall_s / cost.trained_tokens
            print(f"{self.name}: TRL, {settings}: {1e6 * tried[settings]:.0f} us per trained token", flush=True)
        return min(tried, key=lambda settings: tried[settings])

    @property
    def _config(self) -> Path:
        return self.folder / "config.toml"


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def _mean_reward(groups: list[dict[str, Any]]) -> float:
    return statistics.mean(reward for group in groups for reward in group["rewards"])


# ----------------------------------------------------------------------------------------------------------- comparison
def compare(variant: Variant, settings: Settings, repeats: int) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """Both sides `repeats` times in turn; rows and figures."""
    costs: dict[str, list[Cost]] = {"rollart": [], "trl": []}
    rows = []
    for repetition in range(repeats):
        for side in sorted(costs, reverse=repetition % 2 == 0):
            cost = variant.trl(repetition, settings) if side == "trl" else variant.rollart(repetition)
            costs[side].append(cost)
            rows.append(cost.row(variant.name, f"trl {TRL}" if side == "trl" else side, repetition))
        ours, theirs = costs["rollart"][-1], costs["trl"][-1]
        if ours.trajectories != theirs.trajectories:
            raise SystemExit(
                f"{ours.trajectories} trajectories of ours, {theirs.trajectories} of TRL's: not comparable"
            )
    return rows, _figures(variant.name, costs["rollart"], costs["trl"])


def _figures(name: str, ours: list[Cost], theirs: list[Cost]) -> dict[str, float]:
    def ratio(above: list[float], below: list[float]) -> float:
        return statistics.median(above) / statistics.median(below)

    figures = {
        f"wall_ratio_{name}": ratio(*([each.wall_s / each.trained_tokens for each in side] for side in (theirs, ours))),
        f"cpu_ratio_{name}": ratio(*([each.cpu_s / each.trained_tokens for each in side] for side in (theirs, ours))),
    }
    rewards = [[each.last_reward for each in side] for side in (ours, theirs)]
    if statistics.median(rewards[1]) > 0:
        figures[f"reward_ratio_{name}"] = ratio(*rewards)
    else:
        print(f"{name}: TRL's reward is 0, so there is no reward_ratio_{name}; take more --steps")
    return figures


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--variant", choices=["single", "multi", "both"], default="both")
    options.add_argument("--repeats", type=int, help="repetitions of each side (default: 3; with --quick 1)")
    options.add_argument("--steps", type=int, help=f"optimizer steps (default: {STEPS}; with --quick {QUICK_STEPS})")
    arguments = options.parse_args()
    make_environment()
    rows, summary = [], {}
    with tempfile.TemporaryDirectory(prefix="peer-trl-") as scratch:
        for name in TASKS if arguments.variant == "both" else [arguments.variant]:
            steps = arguments.steps or (QUICK_STEPS if arguments.quick else STEPS[name])
            variant = Variant.prepare(name, Path(scratch, name), steps)
            settings = QUICK_SETTINGS if arguments.quick else variant.fastest()
            more_rows, figures = compare(variant, settings, arguments.repeats or (1 if arguments.quick else 3))
            rows += more_rows
            summary |= {
                **figures,
                f"trl_threads_{name}": settings.threads,
                f"trl_micro_batch_{name}": settings.micro_batch,
            }
    publish("peer_trl", rows, summary, arguments.json, packages=("torch", "transformers"))


if __name__ == "__main__":
    main()
