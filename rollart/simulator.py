"""`rollart simulate`: the control plane as it is, under a virtual clock, over modelled devices.

TrainingLoop, RolloutScheduler, EnvManagers, LLMProxy, Router, SampleBuffer, Supervisor, ResourceManager and Workers are
those of `rollart train`; only what lives in the workers is simulated (`data/simulated`).

Invariant: the same config gives the same result, bit for bit; nothing sleeps, nothing loads torch. What this file
leaves out: what a device needs for a step (`data/simulated/device.py`), what steps come to (`simulated_steps.py`), and
how a result is shown (`simulation.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from rollart import toml
from rollart.assembly import llm_proxy, services
from rollart.checks import nearest
from rollart.config import Config
from rollart.control.background import Background
from rollart.control.evaluator import EvalResult, Evaluator
from rollart.control.garbage import relax_collector
from rollart.control.ledger import Ledger
from rollart.control.llm_proxy import LLMProxy
from rollart.control.rollout_scheduler import RolloutScheduler
from rollart.control.supervisor import Supervisor
from rollart.control.task_source import TaskSource
from rollart.control.training_loop import StepSummary, TrainingLoop
from rollart.data.simulated.model_shape import load_shape
from rollart.data.simulated.profile import Profile, TaskProfile, load_profile
from rollart.data.simulated.renderer import SimulatedRenderer
from rollart.data.simulated.runtime import SimulatedRuntime, reading_apart, with_nodes
from rollart.data.simulated.timeline import Timeline
from rollart.errors import ConfigError, RunFolderError, boundary
from rollart.resource.routing import Router
from rollart.sections import SimulateConfig
from rollart.simulated_steps import Counters, Steps
from rollart.simulation import Simulation, report, to_json
from rollart.types import TaskSpec, Trajectory
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
    return run_virtual(_prepared(config, timeline, on_step, profile).to_the_end())


def check(config: Config) -> None:
    """Whether `simulate` would begin: model, profile, tasks, pools, workers, faults. Raises as it does."""
    run_virtual(_prepared(config).only_start())


def _prepared(
    config: Config, timeline: Timeline | None = None, on_step: OnStep | None = None, profile: Profile | None = None
) -> Run:
    settings = config.simulate or SimulateConfig()
    if settings.warmup_steps >= config.steps:
        raise ConfigError(
            f"simulate.warmup_steps: {settings.warmup_steps} of {config.steps} steps leave none to measure; raise steps"
        )
    return Run(config, profile or load_profile(settings.profile), timeline, on_step)


def run(config: Config, trace: Path | None, json: Path | None) -> str:
    """As `simulate`, with progress on stderr and the files that were asked for; the report.

    Raises RollartError; where a file could not be written in the end, the report is on stderr.
    """
    timeline = Timeline() if trace is not None else None
    for path in (trace, json):
        if path is not None:
            writable(path)

    def progress(step: int, seconds: float) -> None:
        print(f"rollart: step {step}/{config.steps}: {seconds:.1f} s of virtual time", file=sys.stderr)  # noqa: T201

    simulation = simulate(config, timeline, progress)
    try:
        if json is not None:
            write(json, to_json(simulation))
        if trace is not None and timeline is not None:
            write(trace, msgspec.json.encode(timeline.to_chrome()))
    except RunFolderError:
        print(report(simulation), file=sys.stderr)  # noqa: T201  # minutes of work are not lost for a file
        raise
    return report(simulation)


def writable(path: Path) -> None:
    """Before minutes of work: can the file be written? Raises RunFolderError."""
    if not path.parent.is_dir():
        raise RunFolderError(f"{path}: there is no folder {path.parent}; make it first")
    if path.is_dir():
        raise RunFolderError(f"{path}: it is a folder; name a file")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise RunFolderError(f"{path}: may not be written")


def write(path: Path, data: bytes) -> None:
    """What a command was asked for. Raises RunFolderError."""
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
            key = f"simulate.tasks.{toml.key(name)}" if name in chosen else f"tasks.{toml.key(name)}"
            raise ConfigError(
                f"{key}: the profile has no task {wanted!r}{nearest(wanted, [*profile.tasks])}; "
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
    """The config without what a simulated run does not have: files, shards, other runs, devices of this machine."""
    return replace(
        with_nodes(reading_apart(config)),
        runtime="local",
        trainer="simulated",
        engine="embedded",
        resources=replace(config.resources, store="memory", lease_s=EVER_S),
        rollout=replace(config.rollout, shard_trajectories=1 << 40),
        log=replace(config.log, checkpoint_every=0),
        eval=replace(config.eval, every=0),
    )


class Run:
    """One simulated run; implements `LoopHooks` and `Recorder`.

    `scheduler` and `proxy` are those of the run once it has begun, and stay when it has ended.
    Raises ConfigError for a task, model or profile that is not known.
    """

    def __init__(
        self,
        config: Config,
        profile: Profile,
        timeline: Timeline | None = None,
        on_step: OnStep | None = None,
    ) -> None:
        self._model = load_shape((config.simulate or SimulateConfig()).model)
        self._tasks = profiles_of(config, profile)
        self._config = config = _without_the_rest(config)
        self._profile = profile
        self._settings = config.simulate or SimulateConfig()
        self._timeline, self._on_step = timeline, on_step
        self._ledger = Ledger()
        self._said: list[str] = []
        self._steps = Steps(config, profile, self._model)
        self._runtime: SimulatedRuntime
        self.scheduler: RolloutScheduler
        self.proxy: LLMProxy
        self.router: Router

    async def to_the_end(self) -> Simulation:
        """Run, and say what came out. Raises what ends a real run."""
        specs = specs_of(self._config, self._tasks)
        async with self._started(specs) as workers:
            relax_collector()
            loop = self._assemble(workers, specs)
            faults = asyncio.ensure_future(self._strike())
            try:
                await loop.run()
                end = self._now()
            finally:
                faults.cancel()
                await asyncio.gather(faults, return_exceptions=True)
            trainer = workers.of_role("actor_train")[0].binding.device_class
            result = self._steps.result(end, self._runtime.engine_classes(), trainer, workers.classes)
        return replace(result, events=self._said)

    async def only_start(self) -> None:
        """Start all workers and end them. Raises what a run would that cannot begin."""
        async with self._started(specs_of(self._config, self._tasks)):
            pass

    @contextlib.asynccontextmanager
    async def _started(self, specs: dict[str, TaskSpec]) -> AsyncIterator[Workers]:
        """All workers, and a config that names nothing that is not there."""
        config = self._config
        self._runtime = SimulatedRuntime(config, self._profile, self._model, self._tasks, self._timeline)
        async with started(config, "simulated", Path(), specs, Path(), {}, True, self._say, self._runtime) as workers:
            self._runtime.check()
            yield workers

    def _assemble(self, workers: Workers, specs: dict[str, TaskSpec]) -> TrainingLoop:
        config, background, renderer = self._config, Background(), SimulatedRenderer()
        prefill = self._settings.prefill
        self.router = workers.router(config.rollout.engine_slots, reserved=[prefill] if prefill else [])
        self.proxy = llm_proxy(config, workers, self.router, background, 0, self._say)
        shared = services(config, workers, self.proxy, renderer, background, self._ledger)
        supervisor = Supervisor(workers.handles, workers.recover)
        source = TaskSource(config.seed, specs)
        self.scheduler = RolloutScheduler(config, specs, source, shared, self._ledger, self, supervisor.fail)
        assert workers.trainer is not None
        evaluator = Evaluator(shared, specs, source, episodes=0)
        return TrainingLoop(
            config, self.scheduler, self.proxy, workers.trainer, evaluator, supervisor, self._ledger, self, [0, 0]
        )

    async def _strike(self) -> None:
        """Let things break when it is time; those that are left when the run ends are told of."""
        left = sorted(self._settings.faults, key=lambda each: each.at_s)
        try:
            while left:
                await asyncio.sleep(max(0.0, left[0].at_s - asyncio.get_running_loop().time()))
                self._say(self._runtime.strike(left.pop(0)))
        finally:
            for fault in left:
                self._say(f"fault of {fault.at_s:g} s: the run ended before")

    def _say(self, line: str) -> None:
        self._said.append(f"{asyncio.get_running_loop().time():.1f} s: {line}")

    def _now(self) -> Counters:
        now_s, runtime = asyncio.get_running_loop().time(), self._runtime
        engines, rewards = runtime.engine_stats(), runtime.reward_seconds()
        return self._steps.counters(now_s, self._ledger, engines, rewards, runtime.cut_tokens())

    # ------------------------------------------------------------------------------------------- hooks of the loop
    async def step_done(self, summary: StepSummary) -> None:
        """Count it, once steps are measured."""
        if self._on_step is not None:
            self._on_step(summary.step, summary.seconds)
        if summary.step > self._settings.warmup_steps:
            self._steps.done(summary.seconds, summary.batch, self._now())
        elif summary.step == self._settings.warmup_steps:
            self._steps.begin(self._now())

    async def checkpoint(self, step: int) -> None:
        """Nothing is kept."""

    async def evaluated(self, step: int, result: EvalResult) -> None:
        """There are no episodes of evaluation."""

    def tell(self, line: str) -> None:
        """One more thing that happened."""
        self._say(line)

    # ---------------------------------------------------------------------------------------- recorder of trajectories
    def add(self, name: str, value: float) -> None:
        """Not needed."""

    def count(self, name: str, value: float = 1) -> None:
        """Not needed."""

    def trajectory(self, trajectory: Any, kept: bool) -> None:
        """Count what nobody trains on."""
        if not kept and isinstance(trajectory, Trajectory):
            self._steps.lost(trajectory)
