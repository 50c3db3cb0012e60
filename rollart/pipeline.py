"""The composition root: one config in, one trained run out.

This is the only place that knows control, data and files together. It starts the workers, hands control its handles,
runs the training loop, and makes sure that on every way out nothing is left running and what was earned is on disk.
What this file leaves out: decisions (control), work (data), and what is written or shown (`observer.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from functools import reduce
from pathlib import Path

import msgspec

from rollart.assembly import llm_proxy, services
from rollart.checkpoint import Checkpoints, ControlState
from rollart.config import Config
from rollart.console import View, open_view
from rollart.control.background import Background
from rollart.control.env_manager import Services
from rollart.control.evaluator import EvalResult, Evaluator
from rollart.control.garbage import relax_collector
from rollart.control.ledger import Ledger
from rollart.control.llm_proxy import LLMProxy
from rollart.control.rollout_scheduler import RolloutScheduler
from rollart.control.sharding import ShardedRunner
from rollart.control.supervisor import Supervisor
from rollart.control.task_source import TaskSource
from rollart.control.training_loop import TrainingLoop
from rollart.data.serverless.meter import Usage as FunctionUsage
from rollart.data.weights_place import in_folder, weights_place
from rollart.errors import ConfigError, RunFolderError, boundary
from rollart.exporter import serving
from rollart.metrics import Metrics
from rollart.observer import Observer, Totals
from rollart.report import warnings
from rollart.run_folder import RunFolder, resolved_config
from rollart.scaling import EnvironmentScaler
from rollart.shard import RemoteShard
from rollart.tasks import registry, warmup
from rollart.tasks.chat import ChatRenderer
from rollart.types import TaskSpec
from rollart.usage import Usage
from rollart.workers import Workers, started

CANARY_TEXT = "The canary sings 0 1 2 3 4 5 6 7 8 9, up and down, left and right, from the start to the goal."
WARMUP_BATCH_TOKENS = 2048
PROGRESS_S = 15.0
FIXED = (
    "seed",
    "model.name",
    "schedule",
    "effective_alpha",
    "rollout.groups_per_batch",
    "rollout.group_size",
    "rollout.extra_groups",
)
"""What a resumed run cannot change."""


def train(config: Config, resume: Path | None = None, checkpoint: int | None = None) -> int:
    """Train to the end, or until Ctrl-C; the exit code. Raises RollartError.

    `checkpoint`: the step to go on from (default: the newest); what the run did after it is forgotten.
    """
    began = time.monotonic()
    with contextlib.closing(open_view()) as view:
        if resume is None:
            with RunFolder.create(config, sys.argv, warn=view.warn) as folder:
                return asyncio.run(_Run(config, folder, view, None, began).to_the_end())
        state = _resumable(config, resume, checkpoint)
        with RunFolder.open(resume, warn=view.warn) as folder:
            return asyncio.run(_Run(config, folder, view, state, began).to_the_end())


def _resumable(config: Config, run: Path, checkpoint: int | None) -> ControlState:
    _check_same_data(config, resolved_config(run))
    state = Checkpoints(run / "checkpoints", config.log.checkpoints_kept).read(checkpoint)
    if state.step >= config.steps:
        raise ConfigError(
            f"steps: {run} has done {state.step} of {config.steps} steps; ask for more, such as "
            f"steps={state.step + config.steps}"
        )
    return state


def _check_same_data(config: Config, earlier: Config) -> None:
    """What open and finished groups of a checkpoint depend on must not change. Raises ConfigError."""
    for key in FIXED:
        wanted, was = (reduce(getattr, key.split("."), each) for each in (config, earlier))
        if wanted != was:
            raise ConfigError(f"{key}: {wanted} differs from the {was} of the run to resume; leave it as it was")
    for name in earlier.tasks:
        if name not in config.tasks:
            raise ConfigError(f"tasks.{name}: the run to resume has this task; leave it, with weight 0 if unwanted")


def evaluate(run: Path, episodes: int | None = None, checkpoint: int | None = None) -> int:
    """Evaluate a checkpoint of a run on held-out seeds, greedy, and print a line per task. Raises RollartError."""
    config = resolved_config(run)
    checkpoints = Checkpoints(run / "checkpoints", config.log.checkpoints_kept)
    state = checkpoints.read(checkpoint)
    result = asyncio.run(_evaluate(config, run, state, checkpoints.trainer_folder(state.step), episodes))
    print(f"checkpoint of step {state.step}, greedy, held-out seeds")  # noqa: T201
    for name, task in result.tasks.items():
        print(  # noqa: T201
            f"{name}: success {task.success:.3f}  reward {task.reward:.3f}  turns {task.turns:.1f}  "
            f"tokens {task.tokens:.1f}  episodes {task.episodes}  failed {task.failed}"
        )
    return 0


async def model_folder(name: str) -> Path:
    """The folder of a model, found or made in a process of its own, so that this one never loads torch."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "rollart.data.model", name),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        out, err = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode:
        lines = err.decode(errors="replace").strip().splitlines()
        raise ConfigError(lines[-1] if lines else f"model.name: {name!r} cannot be loaded")
    return Path(out.decode().strip().splitlines()[-1])


class _Run:
    """One call of `train`."""

    def __init__(self, config: Config, folder: RunFolder, view: View, state: ControlState | None, began: float) -> None:
        self._config, self._folder, self._view, self._state = config, folder, view, state
        self._began = began
        self._usage = Usage()
        source = state.step if state is not None else None
        self._checkpoints = Checkpoints(folder.path / "checkpoints", config.log.checkpoints_kept, source)
        self._loop: TrainingLoop | None = None
        self._observer: Observer | None = None
        self._main: asyncio.Task[None] | None = None
        self._interrupts = 0
        self._summarised = False

    async def to_the_end(self) -> int:
        """Run; write the summary on every way out."""
        self._main = asyncio.ensure_future(self._work())
        outcome = "interrupted"
        with _signals(self._interrupt, self._hang_up):
            try:
                await self._main
                outcome = "stopped" if self._loop is not None and self._loop.stopping else "completed"
            except asyncio.CancelledError:
                pass
            except Exception as error:
                outcome = f"{type(error).__name__}: {error}"
                self._folder.log(f"error: {outcome}")
                if self._checkpoints.steps():
                    self._say_way_on("the run has ended")
                raise
            finally:
                self._summarise(outcome)
        self._folder.log(outcome)
        self._say_end(outcome)
        return 0 if outcome == "completed" else 130

    def _summarise(self, outcome: str) -> None:
        """A start that failed leaves its reason too, but for that of a resumed run, which keeps what it had."""
        if self._observer is not None:
            self._summarised = self._folder.write_summary(self._observer.summary(outcome))
        elif self._state is None:
            self._summarised = self._folder.write_summary({"outcome": outcome, "steps": 0})

    def _interrupt(self) -> None:
        """The first Ctrl-C finishes the step and saves; the second one ends at once."""
        self._interrupts += 1
        if self._interrupts == 1 and self._loop is not None:
            self._view.say("stopping after this step, with a checkpoint; Ctrl-C again ends at once")
            self._loop.request_stop()
        elif self._main is not None:
            self._main.cancel()

    def _hang_up(self) -> None:
        """The terminal is gone: as the first Ctrl-C, but never the second, for shell and kernel may both tell us."""
        if not self._interrupts:
            self._interrupt()

    def _announce(self, line: str) -> None:
        self._view.say(line)
        self._folder.log(line)

    def _say_end(self, outcome: str) -> None:
        path = self._folder.path
        if outcome == "completed":
            self._view.say(f"done: {path}/summary.json" if self._summarised else f"done: {path}, without a summary")
        else:
            self._say_way_on(outcome)

    def _say_way_on(self, ended: str) -> None:
        if steps := self._checkpoints.steps():
            self._view.say(f"{ended}; go on from step {steps[-1]} with: rollart train --resume {self._folder.path}")
        else:
            self._view.say(f"{ended} before the first checkpoint")

    async def _work(self) -> None:
        config, state = self._config, self._state
        specs = registry.specs(config)
        self._view.say(f"run folder {self._folder.path}")
        # What an adapter was trained on is the model as it came; a checkpoint holds it merged.
        saved = self._checkpoints.trainer_folder(state.step) if state is not None and not config.train.lora.r else None
        model = saved or await model_folder(config.model.name)
        model_bytes = 2 * sum(path.stat().st_size for path in model.glob("*.safetensors"))
        path, say = self._folder.path, self._announce
        with serving(config.log.prometheus, self._values, self._rewards, self._view.say):
            self._view.say("starting workers")
            async with (
                weights_place(config, path, model_bytes) as weights,
                started(config, _unique(path), path / "logs", specs, model, weights, True, say) as workers,
            ):
                if state is None:
                    self._folder.become_latest()
                await self._prepare(workers, specs, model)
                await self._train(workers, specs, model)

    def _values(self) -> dict[str, float]:
        return self._observer.values if self._observer is not None else {}

    def _rewards(self) -> dict[str, FunctionUsage]:
        return self._observer.rewards if self._observer is not None else {}

    async def _prepare(self, workers: Workers, specs: dict[str, TaskSpec], model: Path) -> None:
        """Load the trainer's state, or warm a new model up."""
        assert workers.trainer is not None
        if self._state is not None:
            self._view.say(f"resuming after step {self._state.step}")
            await workers.trainer.load(str(self._checkpoints.trainer_folder(self._state.step)))
            self._go_on_from(self._state.step)
            return
        for warning in warnings(self._config):
            self._folder.note(warning)
        settings = self._config.model
        if not settings.warmup_steps:
            return
        self._view.say(f"warm-up: {settings.warmup_steps} supervised steps on random, well-formed actions")
        sequences = await asyncio.to_thread(self._warmup_sequences, specs, model)
        rate = settings.warmup_learning_rate
        work = workers.trainer.warmup(sequences, settings.warmup_steps, rate, WARMUP_BATCH_TOKENS)
        running = asyncio.ensure_future(work)
        try:
            while not (await asyncio.wait({running}, timeout=PROGRESS_S))[0]:
                step, loss = await workers.trainer.warmup_progress()
                self._view.say(f"warm-up: step {step}/{settings.warmup_steps}, loss {loss:.3f}")
        finally:
            running.cancel()  # the run was interrupted
        first, last = running.result()
        self._view.say(f"warm-up: loss {first:.3f} -> {last:.3f}, {time.monotonic() - self._began:.0f} s since start")

    def _go_on_from(self, step: int) -> None:
        """What the run did after `step` is forgotten: only now that all workers are there and have what they need."""
        self._checkpoints.forget_after(step)
        self._folder.write_config(self._config, sys.argv)
        self._folder.rewind(step)

    def _warmup_sequences(self, specs: dict[str, TaskSpec], model: Path) -> list[tuple[list[int], list[float]]]:
        tasks = {name: (spec, registry.factory(self._config.tasks[name], name)) for name, spec in specs.items()}
        for name in warmup.left_out(tasks):
            self._view.warn(f"task {name!r} has no sample_action: the warm-up leaves it out")
        settings = self._config.model
        played = warmup.episodes(
            tasks,
            ChatRenderer(model),
            settings.warmup_episodes,
            self._config.seed,
            observation_weight=settings.warmup_observation_weight,
        )
        return [(sequence.tokens, sequence.weights) for sequence in played]

    async def _train(self, workers: Workers, specs: dict[str, TaskSpec], model: Path) -> None:
        assert workers.trainer is not None
        config, state = self._config, self._state
        ledger, background = Ledger(), Background()
        supervisor = Supervisor(workers.handles, workers.recover)
        relax_collector()
        metrics = Metrics({name: spec.success_reward for name, spec in specs.items()})
        renderer = ChatRenderer(model)
        step = state.step if state is not None else 0
        proxy = llm_proxy(
            config, workers, workers.router(config.rollout.engine_slots), background, step, self._announce
        )
        shared = services(config, workers, proxy, renderer, background, ledger)
        source = TaskSource(config.seed, specs)
        runner = await _sharded(workers, shared, ledger, specs, step, self._announce)
        scheduler = RolloutScheduler(config, specs, source, shared, ledger, metrics, supervisor.fail, runner=runner)
        totals = Totals()
        if state is not None:
            with boundary(RunFolderError, f"the checkpoint of step {step} in {self._folder.path} is damaged"):
                scheduler.restore(state.scheduler)
                ledger.restore(state.ledger)
                totals = msgspec.convert(state.totals, Totals)
        self._observer = observer = Observer(
            config,
            self._folder,
            self._view,
            self._checkpoints,
            scheduler,
            proxy,
            ledger,
            metrics,
            self._usage,
            workers.trainer.save,
            workers.report,
            totals,
            step,
            self._began,
            workers.reward,
        )
        evaluator = Evaluator(shared, specs, source, config.eval.episodes, config.rollout.engine_slots)
        canary = renderer.first("", CANARY_TEXT)[: config.rollout.max_model_tokens]
        self._loop = TrainingLoop(
            config, scheduler, proxy, workers.trainer, evaluator, supervisor, ledger, observer, canary, start_step=step
        )
        workers.end = self._loop.end
        watching = [asyncio.ensure_future(observer.watch()), asyncio.ensure_future(workers.watch_runtime())]
        if _scales(config):
            scaler = EnvironmentScaler(workers, proxy.stats, ledger.clock.counts, supervisor.watch, workers.decide)
            watching.append(asyncio.ensure_future(scaler.run()))
        try:
            await self._loop.run()
        finally:
            for task in watching:
                task.cancel()
            await asyncio.gather(*watching, return_exceptions=True)


async def _evaluate(config: Config, run: Path, state: ControlState, model: Path, episodes: int | None) -> EvalResult:
    specs = registry.specs(config)
    served = config.engine == "http"  # whatever the server holds; other engines begin with the weights of `model`
    weights = {} if served else in_folder(config.weights, run / "weights")
    async with started(config, _unique(run), run / "logs", specs, model, weights, False, _say) as workers:
        background, ledger = Background(), Ledger()
        proxy = llm_proxy(config, workers, workers.router(config.rollout.engine_slots), background, state.version, _say)
        shared = services(config, workers, proxy, ChatRenderer(model), background, ledger)
        source = TaskSource(config.seed, specs)
        evaluator = Evaluator(shared, specs, source, episodes or config.eval.episodes, config.rollout.engine_slots)
        work = _evaluate_served(proxy, state.version, evaluator) if served else evaluator.run()
        return await Supervisor(workers.handles, workers.recover).guard(work)


async def _evaluate_served(proxy: LLMProxy, version: int, evaluator: Evaluator) -> EvalResult:
    """Evaluate once the servers have loaded what their workers know as `version`."""
    await proxy.suspend()
    await proxy.update(version)
    await proxy.resume()
    return await evaluator.run()


def _scales(config: Config) -> bool:
    """Whether the number of environment workers is left to us; inline they have no processor time of their own."""
    asked = config.roles["environment"].workers if "environment" in config.roles else 0
    return not asked and config.runtime != "inline"


def _unique(run: Path) -> str:
    """The name under which a process holds devices: that of its run, told apart from an earlier process of it."""
    return f"{run.name}-{socket.gethostname()}-{os.getpid()}".replace("/", "-")


def _say(line: str) -> None:
    print(f"rollart: {line}", file=sys.stderr)  # noqa: T201


async def _sharded(
    workers: Workers,
    shared: Services,
    ledger: Ledger,
    specs: dict[str, TaskSpec],
    version: int,
    say: Callable[[str], None],
) -> ShardedRunner | None:
    """Who runs the trajectories where the run has rollout shards."""
    shards = workers.of_role("rollout")
    if not shards:
        return None
    runner = ShardedRunner(shared, ledger.clock, specs, version, say)
    shared.proxy.followers = workers.runner = runner
    for shard in shards:
        await runner.join(RemoteShard(shard.handle))
    return runner


@contextlib.contextmanager
def _signals(interrupt: Callable[[], None], hang_up: Callable[[], None]) -> Iterator[None]:
    loop = asyncio.get_running_loop()
    gone = asyncio.Event()

    def hung_up() -> None:
        gone.set()
        hang_up()

    handlers = {signal.SIGINT: interrupt, signal.SIGTERM: interrupt}
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # as under nohup
        handlers[signal.SIGHUP] = hung_up
    for number, handler in handlers.items():
        loop.add_signal_handler(number, handler)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_BLOCK, handlers)
        for number in handlers:
            loop.remove_signal_handler(number)
        if gone.is_set():  # a terminal that is gone may say so again while the process ends
            signal.signal(signal.SIGHUP, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, handlers)
