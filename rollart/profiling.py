"""A recorded run as a workload profile, so that `rollart simulate` plays what really happened.

Distributions come from the sampled trajectories (`trajectories/step-*.jsonl`), rates from counts over all trajectories
(`metrics.jsonl`, `batches.jsonl`), the work of rewards from `summary.json`, training from the seconds and tokens of the
train steps. Invariant: every number says in `reasons` from how much it comes, and what is thin is warned of.
What this file leaves out: evaluations, which are greedy; how fast engines were, which is the device model's business;
and ties between quantities of one trajectory, for a profile draws every turn on its own.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from rollart.config import Config
from rollart.data.simulated.fit import fitted, rounded, shared_part
from rollart.data.simulated.profile import NOTHING, Link, Profile, Spread, TaskProfile, load_profile
from rollart.errors import ConfigError, RunFolderError
from rollart.run_folder import resolved_config
from rollart.types import ABORTED

ENOUGH = 30
"""Sampled trajectories of a task below which its numbers are rough."""
GROUPS = 8
"""Groups with several samples from which it can be told what their members share."""
BIASED = 0.05
"""Share of aborted trajectories from which those that were trained on no longer stand for all."""
NO_REWARD_S = 1e-3
"""A trajectory that is scored faster than this was scored by its environment."""
UNLIMITED = 1e18


class Recorded(Struct, frozen=True):
    """A profile, and what a user should know of it: one line each."""

    profile: Profile
    warnings: list[str]


class _Sample(Struct, frozen=True):
    """What is needed of one line of `trajectories/*.jsonl`."""

    task: str
    group_id: str
    seconds: dict[str, float]
    failed_resets_s: list[float]
    turn_observation_tokens: list[int]
    turn_response_tokens: list[int]
    turn_step_s: list[float]


class _Group(Struct, frozen=True):
    task: str
    rewards: list[float]


class _Batch(Struct, frozen=True):
    groups: list[_Group]


class _Function(Struct, frozen=True):
    """What `summary.json` says of the reward function of a task."""

    results: int = 0
    busy_s: float = 0.0


class _Summary(Struct, frozen=True):
    rewards: dict[str, _Function] = msgspec.field(default_factory=dict)


class _Run(Struct, frozen=True):
    """All that is read of a run folder. `steps`: metrics of each train step; `totals`: their sums by name."""

    config: Config
    steps: list[dict[str, float]]
    totals: dict[str, float]
    samples: list[_Sample]
    groups: list[_Group]
    functions: dict[str, _Function]


def recorded(folder: str | Path) -> Recorded:
    """The profile of the run in `folder`. Raises ConfigError when it is no run, or holds too little to profile."""
    run = _read(Path(folder))
    by_task: defaultdict[str, list[_Sample]] = defaultdict(list)
    for sample in run.samples:
        by_task[sample.task].append(sample)
    if not by_task:
        raise ConfigError(f"{folder}: keeps no sampled trajectory yet; log.trajectories_every = 1 samples every step")
    paper = load_profile("paper")
    seconds, seconds_reason = _train_seconds(run.steps)
    push, push_reason = _push(run.steps)
    free = Link(latency_s=0.0, bytes_per_s=UNLIMITED)
    profile = Profile(
        engine="emulated" if run.config.engine == "emulated" else "roofline",
        train_s_per_token=seconds,
        reasons={
            "engine": f"engine {run.config.engine!r} of the run",
            "train_s_per_token": seconds_reason,
            "efficiency": "a run does not tell it: as in profile 'paper'",
            "links": push_reason,
        },
        efficiency=paper.efficiency,
        links={"push": push, "pull": free, "load": free, "kv": paper.links["kv"]},
        tasks={name: _task(run, name, by_task[name]) for name in run.config.tasks if name in by_task},
    )
    return Recorded(profile, list(_warnings(run, by_task)))


def _warnings(run: _Run, by_task: Mapping[str, Sequence[_Sample]]) -> Iterator[str]:
    if missing := [name for name in run.config.tasks if name not in by_task]:
        yield f"no sampled trajectory of {', '.join(missing)}: left out; log.trajectories_every = 1 samples every step"
    if few := [f"{name} {len(samples)}" for name, samples in by_task.items() if len(samples) < ENOUGH]:
        yield (
            f"few sampled trajectories ({', '.join(few)}), so that numbers of these tasks are rough; "
            "log.trajectories_every = 1 and log.trajectories = 64 keep more"
        )
    aborted = sum(run.totals.get(f"stopped/{reason}", 0.0) for reason in ABORTED)
    share = aborted / max(1.0, run.totals.get("trajectories", 0.0))
    if share > BIASED:
        yield (
            f"{share:.0%} of the trajectories were aborted, long ones first, so that the samples are too short; "
            "a run with schedule = 'sync_plus' and without redundancy shows all of them"
        )


# ------------------------------------------------------------------------------------------------------------ reading
def _read(folder: Path) -> _Run:
    try:
        config = resolved_config(folder)
    except RunFolderError as error:
        raise ConfigError(str(error)) from error
    lines = _lines(folder / "metrics.jsonl", dict[str, float])
    steps = [line for line in lines if "train/seconds" in line]
    if not steps:
        raise ConfigError(f"{folder}: no step of this run is done yet, so that there is nothing to profile")
    totals: defaultdict[str, float] = defaultdict(float)
    for step in steps:
        for name, value in step.items():
            totals[name] += value
    files = sorted((folder / "trajectories").glob("step-*.jsonl"))
    samples = [sample for path in files for sample in _lines(path, _Sample) if sample.turn_response_tokens]
    groups = [group for batch in _lines(folder / "batches.jsonl", _Batch) for group in batch.groups]
    return _Run(config, steps, dict(totals), samples, groups, _functions(folder / "summary.json"))


def _lines(path: Path, kind: Any) -> list[Any]:
    """One value per whole line; a last line without its newline is being written. None before the file is there."""
    found: list[Any] = []
    if not path.exists():
        return found
    for number, line in enumerate(_bytes(path).split(b"\n")[:-1], start=1):
        try:
            found.append(msgspec.json.decode(line, type=kind))
        except msgspec.MsgspecError as error:
            raise ConfigError(f"{path}, line {number}: {error}; was it written by another version?") from error
    return found


def _functions(path: Path) -> dict[str, _Function]:
    """Empty while the run goes on: the summary is written at its end."""
    if not path.exists():
        return {}
    try:
        return msgspec.json.decode(_bytes(path), type=_Summary).rewards
    except msgspec.MsgspecError as error:
        raise ConfigError(f"{path}: {error}") from error


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}") from error


# ----------------------------------------------------------------------------------------------- trainer and weights
def _train_seconds(steps: Sequence[Mapping[str, float]]) -> tuple[float | None, str]:
    """Seconds per trained token; the first step of a longer run warms up and is left out."""
    counted = steps[1:] if len(steps) > 4 else steps
    seconds, tokens = (sum(step[f"train/{name}"] for step in counted) for name in ("seconds", "tokens"))
    if not seconds or not tokens:
        return None, "no token was trained on"
    return rounded(seconds / tokens), f"{len(counted)} train steps, {tokens:,.0f} generated tokens in {seconds:.4g} s"


def _push(steps: Sequence[Mapping[str, float]]) -> tuple[Link, str]:
    """All that weights took per step, whatever their size: publishing, reading, loading and checking them."""
    first, last = (step.get("wait/weights", 0.0) for step in (steps[0], steps[-1]))
    seconds = (last - first) / (len(steps) - 1) if len(steps) > 1 else last
    reason = f"weights took {rounded(seconds):g} s per step in the mean of {len(steps)} steps, all booked on push"
    return Link(latency_s=rounded(max(0.0, seconds)), bytes_per_s=UNLIMITED), reason


# -------------------------------------------------------------------------------------------------------------- tasks
def _task(run: _Run, name: str, samples: Sequence[_Sample]) -> TaskProfile:
    steps = [seconds for sample in samples for seconds in sample.turn_step_s]
    resets = [sample.seconds.get("reset", 0.0) for sample in samples if not sample.failed_resets_s]
    later = [tokens for sample in samples for tokens in sample.turn_observation_tokens[1:]]
    responses = [tokens for sample in samples for tokens in sample.turn_response_tokens]
    turns, shared = _turns(samples)
    failing_reset, reset_rate, failed_resets = _reset_failures(run, name, samples)
    step_rate, failed_steps = _step_failures(run, name)
    reward, overhead, scored = _reward(run, name, samples)
    equal, counted = _equal_rewards(run, name)
    of_samples = f"{len(samples)} sampled trajectories"
    return TaskProfile(
        turns=turns,
        prompt_tokens=fitted([sample.turn_observation_tokens[0] for sample in samples], bounded=True),
        observation_tokens=fitted(later, bounded=True),
        response_tokens=fitted(responses, bounded=True),
        turns_shared=shared,
        equal_rewards=equal,
        reset_s=fitted(resets),
        step_s=fitted(steps),
        reset_failure_rate=reset_rate,
        reset_failure_s=failing_reset,
        step_failure_rate=step_rate,
        reward_s=reward,
        reward_overhead_s=overhead,
        reasons={
            "turns": f"{of_samples} of {len({sample.group_id for sample in samples})} groups",
            "prompt_tokens": of_samples,
            "observation_tokens": f"{len(later)} observations of {of_samples}",
            "response_tokens": f"{len(responses)} answers of {of_samples}",
            "equal_rewards": counted,
            "reset_s": f"{len(resets)} of {of_samples}: those without a failed reset",
            "step_s": f"{len(steps)} steps of {of_samples}",
            "reset_failure_rate": failed_resets,
            "step_failure_rate": failed_steps,
            "reward_s": scored,
        },
    )


def _turns(samples: Sequence[_Sample]) -> tuple[Spread, float]:
    """Turns of members, and how alike they are in a group."""
    groups: defaultdict[str, list[int]] = defaultdict(list)
    for sample in samples:
        groups[sample.group_id].append(len(sample.turn_response_tokens))
    several = sum(len(members) > 1 for members in groups.values())
    shared = rounded(shared_part(groups)) if several >= GROUPS else 0.0
    return fitted([turns for members in groups.values() for turns in members], bounded=True), shared


def _reset_failures(run: _Run, name: str, samples: Sequence[_Sample]) -> tuple[Spread, float, str]:
    failed = run.totals.get(f"resets/{name}/failed", 0.0)
    tries = failed + run.totals.get(f"trajectories/{name}", 0.0)
    reason = f"{failed:.0f} of {tries:.0f} resets of all trajectories"
    if not failed:
        return NOTHING, 0.0, reason
    seen = [seconds for sample in samples for seconds in sample.failed_resets_s]
    mean = Spread(rounded(run.totals.get(f"resets/{name}/failed_s", 0.0) / failed))
    return fitted(seen) if len(seen) >= ENOUGH else mean, rounded(failed / tries), reason


def _step_failures(run: _Run, name: str) -> tuple[float, str]:
    failed, steps = (run.totals.get(f"steps/{name}{part}", 0.0) for part in ("/failed", ""))
    rate = rounded(failed / steps) if failed and steps else 0.0
    return rate, f"{failed:.0f} of {steps:.0f} steps of all trajectories"


def _reward(run: _Run, name: str, samples: Sequence[_Sample]) -> tuple[Spread, Spread, str]:
    """Device seconds of a call, and what a trajectory waited for its score beyond those."""
    scores = [sample.seconds.get("score", 0.0) for sample in samples]
    function = run.functions.get(name)
    if function is None or not function.results:
        overhead = fitted(scores) if sum(scores) > NO_REWARD_S * len(scores) else NOTHING
        return NOTHING, overhead, "summary.json has no calls of a reward function"
    busy_s = rounded(function.busy_s / function.results)
    reason = f"{function.results} calls; what trajectories waited beyond that is the overhead"
    if run.config.tasks[name].reward_scope == "group":
        return Spread(busy_s), NOTHING, f"{function.results} calls, each for a group"
    return Spread(busy_s), fitted([max(0.0, seconds - busy_s) for seconds in scores]), reason


def _equal_rewards(run: _Run, name: str) -> tuple[float, str]:
    """Groups that were replaced because of it, and those that were kept all the same."""
    replaced = run.totals.get(f"groups/zero_variance/{name}", 0.0)
    kept = [len(set(group.rewards)) == 1 for group in run.groups if group.task == name and len(group.rewards) > 1]
    total = replaced + len(kept)
    return (rounded((replaced + sum(kept)) / total) if total else 0.0), f"{total:.0f} complete groups"
