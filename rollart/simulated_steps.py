"""What the steps of a simulated run came to: counters from a moment on, and the result made of them.

Invariant: every figure is of the time since `begin`; tokens that engines generated were trained on, or are wasted, or
belong to trajectories that another step could have trained on (unfinished). What this file leaves out: running the
simulation (`simulator.py`) and showing its result (`simulation.py`).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from rollart.bound import TrainedTrajectory, lower_bound
from rollart.config import Config
from rollart.control.ledger import STAGES, Ledger
from rollart.control.sample_buffer import Batch
from rollart.data.simulated.model_shape import ModelShape
from rollart.data.simulated.profile import Profile
from rollart.data.simulated.runtime import accelerators
from rollart.simulation import Simulation
from rollart.types import EngineStats, Trajectory

CUT = "cut short"
"""In `wasted_tokens`: tokens of turns that were aborted, or whose engine died, before they were whole."""
SUMMED = (
    *("busy_s", "steps", "generated_tokens", "prefilled_tokens", "cached_tokens", "recomputed_tokens", "preempted"),
)
"""Fields of `EngineStats` that only grow."""


class Counters(Struct, frozen=True):
    """Of one moment."""

    at_s: float = 0.0
    waits_s: Mapping[str, float] = {}
    train_s: float = 0.0
    ages: Mapping[int, int] = {}
    aborted: Mapping[str, int] = {}
    discarded: Mapping[str, int] = {}
    wasted: Mapping[str, int] = {}
    engines: Mapping[str, EngineStats] = {}
    rewards: Mapping[str, tuple[float, float]] = {}
    """Per device class, seconds that did work and seconds that are paid."""


class Steps:
    """Told of what happens, step by step. `model` and `profile` are what the bound needs."""

    def __init__(self, config: Config, profile: Profile, model: ModelShape) -> None:
        self._config, self._profile, self._model = config, profile, model
        self._began = self._last = Counters()
        self._step_times: list[float] = []
        self._batches: list[list[TrainedTrajectory]] = []
        self._wasted: Counter[str] = Counter()

    def begin(self, now: Counters) -> None:
        """From now on steps are measured."""
        self._began = now

    def done(self, seconds: float, batch: Batch, now: Counters) -> None:
        """A measured step has ended; no token of its batch is kept."""
        self._last = now
        self._step_times.append(seconds)
        trajectories = [each for group in batch.groups for each in group.trajectories]
        self._batches.append([_compact(each) for each in trajectories])

    def lost(self, trajectory: Trajectory) -> None:
        """Nobody trains on it; its whole turns are wasted."""
        if tokens := trajectory.num_generated_tokens:
            self._wasted[trajectory.stop_reason] += tokens

    def counters(
        self,
        at_s: float,
        ledger: Ledger,
        engines: Mapping[str, EngineStats],
        rewards: Mapping[str, tuple[float, float]],
        cut_tokens: int,
    ) -> Counters:
        """Those of this moment."""
        state = ledger.state()
        return Counters(
            at_s=at_s,
            waits_s=ledger.snapshot()["waits_s"],
            train_s=state["train_s"],
            ages=state["ages"],
            aborted=state["aborted"],
            discarded=state["discarded"],
            wasted={**self._wasted, CUT: cut_tokens},
            engines=engines,
            rewards=rewards,
        )

    def result(self, end: Counters, classes: Mapping[str, str], trainer: str, living: dict[str, str]) -> Simulation:
        """All but the events. `end`: when all was closed, up to which generated tokens are counted; times, ages and
        losses are of the measured steps, and what closing gave up after them is unfinished. Device classes: of each
        engine, also of those that died; of the trainer; of each worker that is left."""
        config, began, last, steps = self._config, self._began, self._last, len(self._step_times)
        seconds = sum(self._step_times)
        waits = {name: s - began.waits_s.get(name, 0.0) for name, s in last.waits_s.items()}
        train_s = last.train_s - began.train_s
        breakdown = {
            "training": train_s / steps,
            **{name: waits.get(name, 0.0) / steps for name in ("weights", "suspended", *STAGES, "nothing_running")},
        }
        trained = [each for batch in self._batches for each in batch]
        tokens = sum(sum(each.prompts) + sum(each.responses) for each in trained)
        engines = _difference(end.engines, began.engines)
        cost = cost_per_hour(config)
        bound = lower_bound(config, self._profile, self._model, self._batches)
        step_s = seconds / steps
        return Simulation(
            schedule=config.schedule,
            alpha=config.effective_alpha,
            steps=steps,
            step_s=step_s,
            step_times=self._step_times,
            tokens_per_step=tokens / steps,
            generated_per_step=sum(sum(each.responses) for each in trained) / steps,
            throughput=tokens / seconds,
            breakdown=breakdown,
            waits_s={name: s for name, s in waits.items() if s},
            utilisation={
                **_busy(_difference(last.engines, began.engines), classes, seconds),
                f"actor_train {trainer}": train_s / seconds,
                **_rewarding(last.rewards, began.rewards),
            },
            age_histogram=_counts(last.ages, began.ages),
            aborted=_counts(last.aborted, began.aborted),
            discarded=_counts(last.discarded, began.discarded),
            wasted_tokens=_counts(last.wasted, began.wasted),
            unfinished_trajectories=_lost(end) - _lost(last),
            unfinished_tokens=sum(end.wasted.values()) - sum(last.wasted.values()),
            generated_tokens=sum(each.generated_tokens for each in engines.values()),
            recomputed_tokens=sum(each.recomputed_tokens for each in engines.values()),
            cost_per_hour=cost,
            cost_per_million_tokens=cost * seconds / 3600 / (tokens / 1e6),
            preemptions=sum(each.preempted for each in engines.values()),
            bound=bound,
            share_of_possible=bound.step_s / step_s,
            trajectories=_means(trained),
            longest=[max((each.seconds for each in batch), key=_sum) for batch in self._batches],
            resources=living,
            events=[],
        )


def _lost(counters: Counters) -> int:
    """Trajectories that nobody trains on."""
    return sum(counters.aborted.values()) + sum(counters.discarded.values())


def cost_per_hour(config: Config) -> float:
    """Of all devices of all pools, in units of the pools' `cost`."""
    sizes = {name: sum(map(len, devices.values())) for name, devices in accelerators(config).items()}
    return sum(pool.cost * sizes.get(name, pool.count) for name, pool in config.pools.items() if not pool.url)


def _busy(engines: Mapping[str, EngineStats], classes: Mapping[str, str], seconds: float) -> dict[str, float]:
    """Busy share of the engines, by class, of all engines that live or lived."""
    busy: defaultdict[str, list[float]] = defaultdict(list)
    for name, stats in engines.items():
        busy[f"actor_gen {classes[name]}"].append(stats.busy_s / seconds)
    return {name: sum(shares) / len(shares) for name, shares in busy.items()}


def _rewarding(after: Mapping[str, tuple[float, float]], before: Mapping[str, tuple[float, float]]) -> dict[str, float]:
    """Share of the seconds paid for reward devices in which they worked, by class."""
    found = {}
    for name, (busy_s, paid_s) in after.items():
        busy_before_s, paid_before_s = before.get(name, (0.0, 0.0))
        if paid_s > paid_before_s:
            found[f"reward {name}"] = (busy_s - busy_before_s) / (paid_s - paid_before_s)
    return found


def _sum(seconds: Mapping[str, float]) -> float:
    return sum(seconds.values())


def _compact(trajectory: Trajectory) -> TrainedTrajectory:
    turns = trajectory.turns
    return TrainedTrajectory(
        task=trajectory.task,
        prompts=[len(turn.observation) for turn in turns],
        responses=[len(turn.action) for turn in turns],
        seconds=dict(trajectory.seconds),
        step_s=sum(turn.step_s for turn in turns),
    )


def _difference(after: Mapping[str, EngineStats], before: Mapping[str, EngineStats]) -> dict[str, EngineStats]:
    return {
        name: replace(stats, **{each: getattr(stats, each) - getattr(before[name], each) for each in SUMMED})
        if name in before
        else stats
        for name, stats in after.items()
    }


def _counts(after: Mapping[Any, int], before: Mapping[Any, int]) -> dict[str, int]:
    return {str(key): after[key] - before.get(key, 0) for key in sorted(after) if after[key] != before.get(key, 0)}


def _means(trained: list[TrainedTrajectory]) -> dict[str, dict[str, float]]:
    """Per task, means over the trained trajectories."""
    by_task: defaultdict[str, list[TrainedTrajectory]] = defaultdict(list)
    for each in trained:
        by_task[each.task].append(each)
    return {
        task: {
            "trajectories": float(len(group)),
            "turns": sum(len(each.prompts) for each in group) / len(group),
            "prompt_tokens": sum(sum(each.prompts) for each in group) / len(group),
            "response_tokens": sum(sum(each.responses) for each in group) / len(group),
            **{stage + "_s": sum(each.seconds.get(stage, 0.0) for each in group) / len(group) for stage in STAGES},
        }
        for task, group in sorted(by_task.items())
    }
