"""`rollart simulate`: the control plane as it is, under a virtual clock, over modelled devices.

TrainingLoop, RolloutScheduler, EnvManagers, LLMProxy, Router, SampleBuffer, Supervisor, ResourceManager and Workers are
those of `rollart train`; only what lives in the workers is simulated (`data/simulated`).

Invariant: the same config gives the same result, bit for bit; nothing sleeps, nothing loads torch. What this file
leaves out: what a device needs for a step (`data/simulated/device.py`), and how a result is shown (`simulation.py`).
"""

from __future__ import annotations

import asyncio
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from rollart import toml
from rollart.bound import TrainedTrajectory, lower_bound
from rollart.checks import nearest
from rollart.config import Config
from rollart.control.background import Background
from rollart.control.env_manager import Services, sampling_of
from rollart.control.evaluator import EvalResult, Evaluator
from rollart.control.garbage import relax_collector
from rollart.control.group_scores import GroupScores
from rollart.control.ledger import STAGES, Ledger
from rollart.control.llm_proxy import LLMProxy
from rollart.control.rollout_scheduler import RolloutScheduler
from rollart.control.supervisor import Supervisor
from rollart.control.task_source import TaskSource
from rollart.control.training_loop import StepSummary, TrainingLoop
from rollart.data.simulated.model_shape import load_shape
from rollart.data.simulated.profile import Profile, TaskProfile, load_profile
from rollart.data.simulated.renderer import SimulatedRenderer
from rollart.data.simulated.runtime import SimulatedRuntime
from rollart.data.simulated.timeline import Timeline
from rollart.errors import ConfigError, RunFolderError, boundary
from rollart.resource.affinity import Affinity
from rollart.sections import SimulateConfig
from rollart.simulation import Simulation, report, to_json
from rollart.types import EngineStats, TaskSpec, Trajectory
from rollart.virtual_time import run_virtual
from rollart.workers import Workers, started

MAX_TURNS = 100_000
"""Where a config says nothing: the profile ends an episode."""
EVER_S = 1e12
OnStep = Callable[[int, float], None]


def simulate(
    config: Config, timeline: Timeline | None = None, on_step: OnStep | None = None, profile: Profile | None = None
) -> Simulation:
    """Run `config.steps` steps in virtual time; `on_step` hears (steps done, seconds of the last one).

    `profile`: default that of `simulate.profile`.

    Raises ConfigError for a task, model or device class that is not known, and whatever ends a real run.
    """
    settings = config.simulate or SimulateConfig()
    if settings.warmup_steps >= config.steps:
        raise ConfigError(
            f"simulate.warmup_steps: {settings.warmup_steps} of {config.steps} steps leave none to measure; raise steps"
        )
    profile = profile or load_profile(settings.profile)
    tasks = profiles_of(config, profile)
    run = _Run(_without_the_rest(config), profile, tasks, timeline, on_step)
    return run_virtual(run.to_the_end())


def run(config: Config, trace: Path | None, json: Path | None) -> str:
    """As `simulate`, with progress on stderr and the files that were asked for; the report. Raises RollartError."""
    timeline = Timeline() if trace is not None else None
    for path in (trace, json):
        if path is not None:
            _writable(path)

    def progress(step: int, seconds: float) -> None:
        print(f"rollart: step {step}/{config.steps}: {seconds:.1f} s of virtual time", file=sys.stderr)  # noqa: T201

    simulation = simulate(config, timeline, progress)
    if trace is not None and timeline is not None:
        _write(trace, msgspec.json.encode(timeline.to_chrome()))
    if json is not None:
        _write(json, to_json(simulation))
    return report(simulation)


def _writable(path: Path) -> None:
    """Before minutes of work: can the file be written? Raises RunFolderError."""
    if not path.parent.is_dir():
        raise RunFolderError(f"{path}: there is no folder {path.parent}; make it first")


def _write(path: Path, data: bytes) -> None:
    with boundary(RunFolderError, str(path)):
        path.write_bytes(data)


def profiles_of(config: Config, profile: Profile) -> dict[str, TaskProfile]:
    """The profile of each task of a config. Raises ConfigError."""
    chosen = (config.simulate or SimulateConfig()).tasks
    for name in chosen:
        if name not in config.tasks:
            raise ConfigError(f"simulate.tasks.{toml.key(name)}: no task has this name{nearest(name, [*config.tasks])}")
    found = {}
    for name in config.tasks:
        wanted = chosen.get(name, name)
        if wanted not in profile.tasks:
            raise ConfigError(
                f"tasks.{toml.key(name)}: the profile has no task {wanted!r}{nearest(wanted, [*profile.tasks])}; "
                f'say which stands for it: simulate.tasks.{toml.key(name)} = "..."'
            )
        found[name] = profile.tasks[wanted]
    return found


def specs_of(config: Config, tasks: Mapping[str, TaskProfile]) -> dict[str, TaskSpec]:
    """What the control plane knows of each task: the config's limits, where it says nothing the profile's alone."""
    longest = config.rollout.max_model_tokens
    return {
        name: TaskSpec(
            name,
            task.weight,
            tag=task.tag or name,
            max_turns=task.max_turns or MAX_TURNS,
            max_turn_tokens=task.max_turn_tokens or longest,
            max_tokens=task.max_tokens or longest,
            has_reward=bool(task.reward) or tasks[name].reward_s.mean > 0 or tasks[name].reward_overhead_s.mean > 0,
            reset_timeout_s=task.reset_timeout_s,
            step_timeout_s=task.step_timeout_s,
            reward_deadline_s=EVER_S,
            reward_scope=task.reward_scope,
            env_retries=task.env_retries,
        )
        for name, task in config.tasks.items()
    }


def _without_the_rest(config: Config) -> Config:
    """The config without what a simulated run does not have: files, shards, other runs."""
    return replace(
        config,
        runtime="local",
        trainer="simulated",
        engine="embedded",
        resources=replace(config.resources, store="memory", lease_s=EVER_S),
        rollout=replace(config.rollout, shard_trajectories=1 << 40),
        log=replace(config.log, checkpoint_every=0),
        eval=replace(config.eval, every=0),
    )


class _Mark(Struct, frozen=True):
    """Counters at the moment from which on steps are measured."""

    at_s: float = 0.0
    waits_s: dict[str, float] = {}
    train_s: float = 0.0
    ages: dict[int, int] = {}
    aborted: dict[str, int] = {}
    discarded: dict[str, int] = {}
    engines: dict[str, EngineStats] = {}


class _Run:
    """One simulated run; implements `LoopHooks` and `Recorder`."""

    def __init__(
        self,
        config: Config,
        profile: Profile,
        tasks: Mapping[str, TaskProfile],
        timeline: Timeline | None,
        on_step: OnStep | None,
    ) -> None:
        self._config, self._profile, self._tasks = config, profile, tasks
        self._settings = config.simulate or SimulateConfig()
        self._timeline, self._on_step = timeline, on_step
        self._model = load_shape(self._settings.model)
        self._ledger = Ledger()
        self._said: list[str] = []
        self._engines: dict[str, EngineStats] = {}
        self._mark = _Mark()
        self._step_times: list[float] = []
        self._batches: list[list[TrainedTrajectory]] = []
        self._wasted: Counter[str] = Counter()
        self._seconds: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self._workers: Workers
        self._proxy: LLMProxy

    async def to_the_end(self) -> Simulation:
        """Run, and say what came out."""
        config = self._config
        specs = specs_of(config, self._tasks)
        runtime = SimulatedRuntime(config, self._profile, self._model, self._tasks, self._timeline)
        async with started(config, "simulated", Path(), specs, Path(), {}, True, self._say, runtime) as workers:
            self._workers = workers
            relax_collector()
            loop = self._assemble(workers, specs)
            faults = asyncio.ensure_future(self._strike(runtime))
            try:
                await loop.run()
                self._engines |= await self._proxy.stats()
            finally:
                faults.cancel()
                await asyncio.gather(faults, return_exceptions=True)
            return self._result()

    def _assemble(self, workers: Workers, specs: dict[str, TaskSpec]) -> TrainingLoop:
        config, background, renderer = self._config, Background(), SimulatedRenderer()
        slots = config.rollout.engine_slots
        affinity = Affinity(workers.placement.affinity, config.affinity_mode, slots)
        self._proxy = workers.proxy = LLMProxy(
            workers.inference(),
            router=workers.router(slots),
            classes=workers.classes,
            background=background,
            affinity=affinity,
            say=self._say,
        )
        services = Services(
            env=workers.environment,
            proxy=self._proxy,
            renderer=renderer,
            sampling=sampling_of(config),
            background=background,
            clock=self._ledger.clock,
            reward=workers.reward,
            group_scores=GroupScores(workers.reward, config.rollout.group_size) if workers.reward else None,
        )
        supervisor = Supervisor(workers.handles, workers.recover)
        source = TaskSource(config.seed, specs)
        scheduler = RolloutScheduler(config, specs, source, services, self._ledger, self, supervisor.fail)
        assert workers.trainer is not None
        evaluator = Evaluator(services, specs, source, episodes=0)
        return TrainingLoop(
            config, scheduler, self._proxy, workers.trainer, evaluator, supervisor, self._ledger, self, [0, 0]
        )

    async def _strike(self, runtime: SimulatedRuntime) -> None:
        loop = asyncio.get_running_loop()
        for fault in sorted(self._settings.faults, key=lambda each: each.at_s):
            await asyncio.sleep(max(0.0, fault.at_s - loop.time()))
            self._say(runtime.strike(fault))

    def _say(self, line: str) -> None:
        self._said.append(f"{asyncio.get_running_loop().time():.1f} s: {line}")

    # ------------------------------------------------------------------------------------------- hooks of the loop
    async def step_done(self, summary: StepSummary) -> None:
        """Keep what the result needs, and no tokens."""
        if self._on_step is not None:
            self._on_step(summary.step, summary.seconds)
        if summary.step <= self._settings.warmup_steps:
            if summary.step == self._settings.warmup_steps:
                self._mark = await self._now()
            return
        self._step_times.append(summary.seconds)
        trajectories = [each for group in summary.batch.groups for each in group.trajectories]
        self._batches.append([_compact(each) for each in trajectories])

    async def checkpoint(self, step: int) -> None:
        """Nothing is kept."""

    async def evaluated(self, step: int, result: EvalResult) -> None:
        """There are no episodes of evaluation."""

    async def _now(self) -> _Mark:
        state = self._ledger.state()
        self._engines |= (stats := await self._proxy.stats())
        return _Mark(
            at_s=asyncio.get_running_loop().time(),
            waits_s={**self._ledger.snapshot()["waits_s"]},
            train_s=state["train_s"],
            ages=state["ages"],
            aborted=state["aborted"],
            discarded=state["discarded"],
            engines=dict(stats),
        )

    # ---------------------------------------------------------------------------------------- recorder of trajectories
    def add(self, name: str, value: float) -> None:
        """Not needed."""

    def count(self, name: str, value: float = 1) -> None:
        """Not needed."""

    def trajectory(self, trajectory: Any, kept: bool) -> None:
        """Tokens of whole turns that nobody trained on, by the reason."""
        if not kept and isinstance(trajectory, Trajectory):
            self._wasted[trajectory.stop_reason] += trajectory.num_generated_tokens

    # ------------------------------------------------------------------------------------------------------ result
    def _result(self) -> Simulation:
        config, mark, steps = self._config, self._mark, len(self._step_times)
        seconds = sum(self._step_times)
        state, snapshot = self._ledger.state(), self._ledger.snapshot()
        waits = {name: s - mark.waits_s.get(name, 0.0) for name, s in snapshot["waits_s"].items()}
        train_s = state["train_s"] - mark.train_s
        breakdown = {
            "training": train_s / steps,
            **{name: waits.get(name, 0.0) / steps for name in ("weights", "suspended", *STAGES, "nothing_running")},
        }
        trained = [each for batch in self._batches for each in batch]
        tokens = sum(sum(each.prompts) + sum(each.responses) for each in trained)
        engines = _difference(self._engines, mark.engines)
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
            utilisation=self._utilisation(engines, train_s, seconds),
            age_histogram=_counts(state["ages"], mark.ages),
            aborted=_counts(state["aborted"], mark.aborted),
            discarded=_counts(state["discarded"], mark.discarded),
            wasted_tokens=dict(self._wasted),
            generated_tokens=sum(each.generated_tokens for each in engines.values()),
            recomputed_tokens=sum(each.recomputed_tokens for each in engines.values()),
            cost_per_hour=cost,
            cost_per_million_tokens=cost * seconds / 3600 / (tokens / 1e6),
            preemptions=sum(each.preempted for each in engines.values()),
            bound=bound,
            share_of_possible=bound.step_s / step_s,
            trajectories=_means(trained),
            resources={name: str(self._workers.classes[name]) for name in self._workers.classes},
            events=self._said,
        )

    def _utilisation(self, engines: Mapping[str, EngineStats], train_s: float, seconds: float) -> dict[str, float]:
        """Busy share of the devices, by role and class."""
        classes = self._workers.classes
        busy: defaultdict[str, list[float]] = defaultdict(list)
        for name, stats in engines.items():
            busy[f"actor_gen {classes.get(name, 'lost')}"].append(stats.busy_s / seconds)
        trainer = self._workers.of_role("actor_train")[0].binding.device_class
        return {
            **{name: sum(shares) / len(shares) for name, shares in busy.items()},
            f"actor_train {trainer}": train_s / seconds,
        }


def cost_per_hour(config: Config) -> float:
    """Of all devices of all pools, in units of the pools' `cost`."""
    return sum(pool.cost * _size(pool.count, pool.nodes) for pool in config.pools.values() if not pool.url)


def _size(count: int, nodes: Mapping[str, str]) -> int:
    from rollart.resource.placement import indices

    return count or sum(len(indices(f"nodes.{node}", text)) for node, text in nodes.items())


def _compact(trajectory: Trajectory) -> TrainedTrajectory:
    turns = trajectory.turns
    return TrainedTrajectory(
        task=trajectory.task,
        prompts=[len(turn.observation) for turn in turns],
        responses=[len(turn.action) for turn in turns],
        seconds=dict(trajectory.seconds),
    )


def _difference(after: Mapping[str, EngineStats], before: Mapping[str, EngineStats]) -> dict[str, EngineStats]:
    fields = (
        "busy_s",
        "steps",
        "generated_tokens",
        "prefilled_tokens",
        "cached_tokens",
        "recomputed_tokens",
        "preempted",
    )
    return {
        name: replace(stats, **{each: getattr(stats, each) - getattr(before[name], each) for each in fields})
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
