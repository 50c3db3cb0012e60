"""Measurements: values that merge, a recorder in memory, and the status that the live view shows.

Invariant: merging is associative and commutative, so it does not matter where or in which order values were gathered;
a recorder never raises into its caller, but counts what it had to refuse. What this file leaves out: where the numbers
go (`run_folder.py`, `console.py`).

Names are paths with '/': `reward/frozenlake`. Those that `Metrics.trajectory` makes itself:

    trajectories, trajectories/kept, trajectories/<task>, stopped/<reason>
    steps/<task>                                                          turns of all trajectories
    reward/<task>, success/<task>, turns/<task>                           of trajectories that will be trained on
    tokens, tokens/generated                                              of all trajectories
    length/kept, length/all                                               generated tokens; their gap is the bias of
                                                                          taking what finishes first
    seconds/<stage>                                                       reset, generate, step, score
    resets/<task>/failed, resets/<task>/failed_s                          resets that failed, and how long they took;
    steps/<task>/failed                                                  steps that failed; where there are any
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

from msgspec import Struct, field

from rollart.types import FAILED, Trajectory


class Mean(Struct, tag="mean"):
    """Observations of one quantity: how many, their sum, and the extremes."""

    count: int = 0
    total: float = 0.0
    minimum: float = math.inf
    maximum: float = -math.inf

    def add(self, value: float) -> None:
        """Take one more observation."""
        self.merge(Mean(1, value, value, value))

    def merge(self, other: Mean) -> None:
        """Take in what another has observed."""
        self.count += other.count
        self.total += other.total
        self.minimum = min(self.minimum, other.minimum)
        self.maximum = max(self.maximum, other.maximum)

    def flat(self, name: str) -> dict[str, float]:
        """The mean under `name`, the extremes below it; nothing when there was no observation."""
        if not self.count:
            return {}
        return {name: self.total / self.count, f"{name}/min": self.minimum, f"{name}/max": self.maximum}


class Sum(Struct, tag="sum"):
    """A running sum."""

    total: float = 0.0

    def add(self, value: float) -> None:
        """Add to the sum."""
        self.total += value

    def merge(self, other: Sum) -> None:
        """Add another sum."""
        self.total += other.total

    def flat(self, name: str) -> dict[str, float]:
        """The sum under `name`."""
        return {name: self.total}


class Max(Struct, tag="max"):
    """The largest value seen."""

    maximum: float = -math.inf

    def add(self, value: float) -> None:
        """Keep `value` if it is the largest so far."""
        self.maximum = max(self.maximum, value)

    def merge(self, other: Max) -> None:
        """Keep the larger of the two."""
        self.add(other.maximum)

    def flat(self, name: str) -> dict[str, float]:
        """The maximum under `name`; nothing before the first value."""
        return {name: self.maximum} if self.maximum > -math.inf else {}


class Histogram(Struct, tag="histogram"):
    """How often each whole number was seen."""

    counts: dict[int, int] = field(default_factory=dict)

    def add(self, value: float, times: int = 1) -> None:
        """Count `value`, rounded down."""
        bucket = math.floor(value)
        self.counts[bucket] = self.counts.get(bucket, 0) + times

    def merge(self, other: Histogram) -> None:
        """Add another's counts."""
        for bucket, times in other.counts.items():
            self.add(bucket, times)

    def flat(self, name: str) -> dict[str, float]:
        """One entry per number seen, below `name`, in order."""
        return {f"{name}/{bucket}": float(self.counts[bucket]) for bucket in sorted(self.counts)}


Value = Mean | Sum | Max | Histogram


class Metrics:
    """A `protocols.Recorder` in memory. `flush` gives one step's numbers; `totals` covers the whole run.

    `success_reward`: per task, the reward from which a trajectory is a success (`TaskSpec.success_reward`; else 1).
    """

    def __init__(self, success_reward: Mapping[str, float] | None = None) -> None:
        self._success_reward = dict(success_reward or {})
        self._step: dict[str, Value] = {}
        self._run: dict[str, Value] = {}
        self._refused = 0

    def add(self, name: str, value: float) -> None:
        """One observation of a distribution: mean, minimum and maximum are kept."""
        self._record(name, Mean, value)

    def count(self, name: str, value: float = 1) -> None:
        """Add to a sum."""
        self._record(name, Sum, value)

    def peak(self, name: str, value: float) -> None:
        """Keep the largest value."""
        self._record(name, Max, value)

    def tally(self, name: str, value: float) -> None:
        """Count a whole number in a histogram."""
        self._record(name, Histogram, value)

    def trajectory(self, trajectory: Any, kept: bool) -> None:
        """A trajectory that ended; see the module for the names. `kept`: it will be trained on."""
        if not isinstance(trajectory, Trajectory):
            self._refused += 1
            return
        task, generated = trajectory.task, trajectory.num_generated_tokens
        for name, number in (
            ("trajectories", 1),
            ("trajectories/kept", int(kept)),
            (f"trajectories/{task}", 1),
            (f"stopped/{trajectory.stop_reason}", 1),
            (f"steps/{task}", len(trajectory.turns)),
            ("tokens", trajectory.num_tokens),
            ("tokens/generated", generated),
            *((f"seconds/{stage}", seconds) for stage, seconds in trajectory.seconds.items()),
        ):
            self.count(name, number)
        if trajectory.stop_reason not in FAILED:
            self.add("length/all", generated)
        if kept:
            self.add("length/kept", generated)
            self.add(f"turns/{task}", len(trajectory.turns))
            self.add(f"reward/{task}", trajectory.reward)
            self.add(f"success/{task}", trajectory.reward >= self._success_reward.get(task, 1.0))
        self._count_failures(trajectory)

    def _count_failures(self, trajectory: Trajectory) -> None:
        if failed := trajectory.failed_resets_s:
            self.count(f"resets/{trajectory.task}/failed", len(failed))
            self.count(f"resets/{trajectory.task}/failed_s", sum(failed))
        if trajectory.stop_reason == "env_error" and trajectory.turns:
            self.count(f"steps/{trajectory.task}/failed")

    def merge(self, values: Mapping[str, Value]) -> None:
        """Take in what was measured elsewhere, for example in a worker."""
        for name, value in values.items():
            if not _merge(self._step.setdefault(name, type(value)()), value):
                self._refused += 1

    def flush(self) -> dict[str, float]:
        """The numbers since the last flush, by name; the next step begins empty.

        `metrics/refused` appears when something was not a finite number, or changed its kind.
        """
        if self._refused:
            self.merge({"metrics/refused": Sum(self._refused)})
        step, self._step, self._refused = self._step, {}, 0
        for name, value in step.items():
            _merge(self._run.setdefault(name, type(value)()), value)
        return _flat(step)

    def totals(self) -> dict[str, float]:
        """The numbers of the whole run, up to the last flush."""
        return _flat(self._run)

    def _record(self, name: str, kind: type[Mean] | type[Sum] | type[Max] | type[Histogram], value: float) -> None:
        number = _finite(value)
        if number is None or not isinstance(name, str) or name == "metrics/refused":
            self._refused += 1
            return
        known = self._step.get(name) or self._run.get(name) or kind()
        if type(known) is kind:
            self._step.setdefault(name, kind()).add(number)
        else:
            self._refused += 1


def _finite(value: object) -> float | None:
    try:
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def _merge(into: Value, value: Value) -> bool:
    if type(into) is not type(value):
        return False
    into.merge(value)  # type: ignore[arg-type]
    return True


def _flat(values: Mapping[str, Value]) -> dict[str, float]:
    return {key: number for name in sorted(values) for key, number in values[name].flat(name).items()}


# ------------------------------------------------------------------------------------------------- for the live view
Stage = Literal["queued", "reset", "generate", "step", "score"]
"""Where a running trajectory is: waiting for an environment or engine slot, or in one of its stages."""


class TaskStatus(Struct, frozen=True, kw_only=True):
    """One task in the live view. A number is None before there is one."""

    reward: float | None = None
    """Mean reward of the trajectories trained on in the last steps."""
    success: float | None = None
    """Their share of successes, 0 to 1."""
    trajectories: int = 0
    """Ended so far in this run."""
    eval_first: float | None = None
    """Success on held-out seeds at the first evaluation, 0 to 1; None as long as it is the latest too."""
    eval_last: float | None = None
    """... and at the latest evaluation."""


class RewardStatus(Struct, frozen=True, kw_only=True):
    """The reward function of one task in the live view."""

    processes: int = 0
    utilisation: float = 0.0
    calls: int = 0
    failures: int = 0
    latency_s: float | None = None
    """Upper bound of the median."""
    cost: float = 0.0


class Status(Struct, frozen=True, kw_only=True):
    """A picture of a run at one moment, made by the pipeline; the view draws it and decides nothing.

    Seconds in `waits` and `stages` cover the same recent window, `window_s` long, so that they can be shown as shares.
    """

    step: int
    """Training steps done."""
    steps: int
    """Training steps asked for."""
    phase: str = "training"
    """What the run does now, in a word or two: starting, warm-up, evaluation, training, saving."""
    folder: str = ""
    """The run folder."""
    schedule: str = "rollart"
    alpha: float = 1.0
    version: int = 0
    """Published weight updates so far."""
    elapsed_s: float = 0.0
    eta_s: float | None = None
    """Seconds until the last step; None when it cannot be told yet."""
    tasks: dict[str, TaskStatus] = field(default_factory=dict)
    loss: float | None = None
    """Of the last step."""
    tokens_per_s: float = 0.0
    """Generated tokens."""
    trajectories_per_s: float = 0.0
    running: dict[str, int] = field(default_factory=dict)
    """Running trajectories by stage (`Stage`)."""
    ready_groups: int = 0
    """Finished groups that wait for training."""
    groups_per_batch: int = 0
    free_slots: int = 0
    """Groups that could be admitted now."""
    slots: int = 0
    ages: dict[int, int] = field(default_factory=dict)
    """Trained trajectories by age, in versions."""
    aborted: dict[str, int] = field(default_factory=dict)
    """Trajectories without use so far, by stop reason."""
    stages: dict[str, float] = field(default_factory=dict)
    """Trajectory-seconds by stage, within the window."""
    train_s: float = 0.0
    """Seconds in train_step, within the window."""
    trainer_waits: dict[str, float] = field(default_factory=dict)
    """Seconds that the trainer waited, by cause. For a batch, by the stage of what is running: reset, generate, step,
    score, nothing_running, no_engine; else weights, suspended, evaluation, checkpoint."""
    engine_waits: dict[str, float] = field(default_factory=dict)
    """Seconds that the engines had nothing to do, or were not there (no_engine), by cause: training (every slot is
    held until it ends), reset, step, score, suspended, weights, iteration."""
    rewards: dict[str, RewardStatus] = field(default_factory=dict)
    """Reward functions by task."""
    window_s: float = 0.0
