"""TrainingLoop: the six steps of asynchronous training (paper section 5), for all five schedules on one code path.

    loop              consumes               waits for                      produces             unblocked by
    ----------------  ---------------------  -----------------------------  -------------------  ----------------------
    RolloutScheduler  tasks of TaskSource    a free slot (continuous), or   running members      a batch that trains or
                                             the iteration's update                              is trained; a dropped
                                                                                                 group; an update
    EnvManager (many) one Start              reset, generate, step, score   one Trajectory       env and reward workers,
                                                                                                 LLMProxy (RESUME)
    SampleBuffer      finished groups        groups_per_batch of them       one Batch            the last finished group
    training task     one Batch              the trainer, then the store    version + 1,         nothing else: it never
                                                                            prefetched           waits for rollout
    TrainingLoop      Batch and version      get_batch; the training task;  an updated, resumed  SampleBuffer; trainer;
                                             a running evaluation           LLMProxy; train_step Evaluator

One iteration:  1 get_batch   2 suspend   3 update   4 resume   5 KV is recomputed (in the engines)   6 train_step.
Where rollout overlaps training, steps 2 to 4 bring the weights of the previous train_step, and step 6 goes on in the
background. Otherwise step 6 comes first and is awaited, and its own weights arrive before the next get_batch.

Invariants: workers and trainer hold the same version when train_step begins; an evaluation sees one version; a
train_step that began is finished, also when the run is asked to stop; one that is finished counts, and is saved before
an error that is not the trainer's ends the run. What it leaves out: files, metrics and recovery, which are the business
of the hooks and the pipeline.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from msgspec import Struct

from rollart.config import Config
from rollart.control.evaluator import EvalResult, Evaluator
from rollart.control.ledger import Ledger
from rollart.control.llm_proxy import LLMProxy
from rollart.control.rollout_scheduler import RolloutScheduler
from rollart.control.sample_buffer import Batch
from rollart.control.supervisor import Supervisor
from rollart.control.weights_check import canary_difference, check_parameters
from rollart.errors import TrainError, WeightsError, WeightsLost, WorkerDied, said
from rollart.protocols import TrainHandle
from rollart.types import EngineStats, TrainBatch, TrainReport

T = TypeVar("T")
LAST_SAVE_S = 1800.0
"""How long the trainer may take to finish its step and to save it, when an error that is not its own ends the run."""


class StepSummary(Struct, frozen=True):
    """One finished train_step. `version` is that of the weights it made; `seconds` since the step before it."""

    step: int
    version: int
    seconds: float
    report: TrainReport
    batch: Batch
    canary: float


class LoopHooks(Protocol):
    """What the pipeline does with the loop's results."""

    async def step_done(self, summary: StepSummary) -> None:
        """A train_step has finished."""
        ...

    async def checkpoint(self, step: int) -> None:
        """Save: `step` train_steps are done, none is running."""
        ...

    async def evaluated(self, step: int, result: EvalResult) -> None:
        """An evaluation of the weights after `step` train_steps."""
        ...

    def tell(self, line: str) -> None:
        """Something that people should read at once."""
        ...


class TrainingLoop:
    """`canary_tokens`: the prompt whose log-probabilities workers and trainer compare after every update.

    `start_step`: train_steps done before, by the run that is resumed.
    """

    def __init__(
        self,
        config: Config,
        scheduler: RolloutScheduler,
        proxy: LLMProxy,
        trainer: TrainHandle,
        evaluator: Evaluator,
        supervisor: Supervisor,
        ledger: Ledger,
        hooks: LoopHooks,
        canary_tokens: Sequence[int],
        start_step: int = 0,
    ) -> None:
        self._config = config
        self._scheduler = scheduler
        self._proxy = proxy
        self._trainer = trainer
        self._evaluator = evaluator
        self._supervisor = supervisor
        self._ledger = ledger
        self._hooks = hooks
        self._canary_tokens = list(canary_tokens)
        self.step = start_step
        """train_steps done, which is also the newest published version."""
        self.canary = 0.0
        """The largest difference of a log-probability that the newest comparison found, in nats."""
        self._canary_expected: asyncio.Future[list[float]] | None = None
        self._checking: asyncio.Task[None] | None = None
        self._training: asyncio.Task[None] | None = None
        self._evaluation: asyncio.Task[None] | None = None
        self._begun = self._saved_step = start_step
        """The newest train_step that began, and the newest that is saved, or is about to be."""
        self._saving: asyncio.Future[None] | None = None
        self._published: int | None = None
        self._evaluated_step: int | None = None
        self._stop = asyncio.Event()
        self._fault: Exception | None = None
        self._saved = False
        self._step_began = 0.0

    def request_stop(self) -> None:
        """Finish the current train_step, save, and return from `run`."""
        self._stop.set()

    def end(self, fault: Exception) -> None:
        """As `request_stop`, but `run` raises `fault`, the first of them, once it has saved; at once if it has."""
        if self._saved:
            self._supervisor.fail(fault)
        self._fault = self._fault or fault
        self._stop.set()

    @property
    def stopping(self) -> bool:
        """Whether `request_stop` was called."""
        return self._stop.is_set()

    async def run(self) -> None:
        """Train `config.steps` steps in all. Raises WorkerDied, WeightsError, RolloutError or TrainError."""
        try:
            await self._supervisor.guard(self._run())
        except Exception as error:
            await self._rescue(error)
            raise
        finally:
            await self._end()

    async def _run(self) -> None:
        await self._begin()
        while self.step + (self._training is not None) < self._config.steps and not self.stopping:
            await self._iterate()
        await self._finish()

    # ----------------------------------------------------------------------------------------------- the iteration
    async def _iterate(self) -> None:
        """The six steps. The two branches are the whole difference between overlap and alternation."""
        batch = await self._unless_stopped(self._scheduler.get_batch())
        if batch is None:
            return
        if self._config.plan.overlap:
            await self._settle()
            if not self.stopping:
                self._launch(batch)
        else:
            self._launch(batch)
            await self._settle()

    async def _unless_stopped(self, work: Coroutine[Any, Any, T]) -> T | None:
        """What `work` returns; None, and `work` is cancelled, when the run is asked to stop first."""
        result = asyncio.ensure_future(work)
        stop = asyncio.ensure_future(self._stop.wait())
        try:
            await asyncio.wait({result, stop}, return_when=asyncio.FIRST_COMPLETED)
            return result.result() if result.done() else None
        finally:
            result.cancel()
            stop.cancel()
            await asyncio.gather(result, stop, return_exceptions=True)

    async def _settle(self) -> None:
        """Wait for the running train_step; save, update and evaluate as due; let the next iteration begin."""
        await self._finish_training()
        if self._due(self._config.log.checkpoint_every):
            await self._save()
        if self._proxy.version != self.step:
            await self._unless_stopped(self._finish_evaluation())
        if self.stopping:
            return
        await self._update()
        if self._due(self._config.eval.every) and not self._is_last():
            self._launch_evaluation()
        if not self._is_last():
            self._scheduler.begin_iteration()

    def _is_last(self) -> bool:
        return self.step >= self._config.steps

    def _due(self, every: int) -> bool:
        return every > 0 and self.step > 0 and self.step % every == 0

    # ---------------------------------------------------------------------------------------------------- training
    def _launch(self, batch: Batch) -> None:
        """Step 6, in the background."""
        self._scheduler.begin_training(batch)
        self._begun = self.step + 1
        self._training = self._spawn(self._train(batch))

    async def _train(self, batch: Batch) -> None:
        """train_step, then publish its weights and let the workers read them ahead, unless that is to wait."""
        step = self.step + 1
        self._ledger.trained(batch, self.step)
        training = TrainBatch(step, self.step, batch.groups)
        # The engines' counters are asked for beside the work, because an engine answers between two of its steps.
        before, (report, seconds) = await asyncio.gather(self._proxy.stats(), self._train_step(training))
        self._scheduler.trained(batch)
        try:
            await asyncio.gather(self._count_overlap(seconds, before), self._deliver(step))
            await self._finish_canary()
        finally:  # it counts, whether or not its weights get anywhere
            self.step = step
            now = asyncio.get_running_loop().time()
            seconds, self._step_began = now - self._step_began, now
            await self._hooks.step_done(StepSummary(step, step, seconds, report, batch, self.canary))

    async def _train_step(self, batch: TrainBatch) -> tuple[TrainReport, float]:
        """The report, and the seconds that the trainer took."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        with self._ledger.training():
            report = await self._trainer.train_step(batch)
        return report, loop.time() - began

    async def _count_overlap(self, seconds: float, before: Mapping[str, EngineStats]) -> None:
        self._ledger.overlapped(seconds, before, await self._proxy.stats())

    async def _deliver(self, version: int) -> None:
        """Publish what train_step made and let the workers read it ahead, unless that is to wait."""
        if self._config.weights.asynchronous:
            await self._publish(version)
            with self._ledger.wait("weights"):
                await self._reach(self._proxy.prefetch, version)

    async def _finish_training(self) -> None:
        """Wait for the running train_step, if any, and raise its error. Who is cancelled meanwhile leaves it alone."""
        if self._training is not None:
            await asyncio.shield(self._training)
            self._training = None

    # ----------------------------------------------------------------------------------------------------- weights
    async def _update(self) -> None:
        """Steps 2 to 4, when there is something new."""
        if self._proxy.version != self.step:
            await self._finish_evaluation()
            await self._load_weights()

    async def _load_weights(self) -> None:
        """Suspend, update, end what is too old, resume; the canary is compared while generation and training go on."""
        await self._finish_canary()
        with self._ledger.wait("suspended"):
            await self._proxy.suspend()
        await self._publish(self.step)
        with self._ledger.wait("weights"):
            await self._reach(self._proxy.update, self.step)
        self._scheduler.updated(self.step)
        with self._ledger.wait("suspended"):
            await self._proxy.resume()
        self._checking = self._spawn(self._check_canary(self.step))

    async def _publish(self, version: int) -> None:
        """Write the trainer's weights to the store, unless they are there; what they say to the canary comes later."""
        if self._published != version:
            publishing = asyncio.ensure_future(self._trainer.publish(version))
            self._canary_expected = asyncio.ensure_future(self._trainer.logprobs(self._canary_tokens))
            with self._ledger.wait("weights"):
                await publishing
            self._published = version

    async def _reach(self, read: Callable[[int], Awaitable[None]], version: int) -> None:
        """Let the workers read what the trainer still has; once more from elsewhere, where the store has lost it."""
        try:
            await read(version)
        except WeightsLost:
            await self._trainer.rescue(version)
            await read(version)

    async def _check_canary(self, version: int) -> None:
        """Workers must give the log-probabilities that the trainer gave. Raises WeightsError."""
        assert self._canary_expected is not None, "what is loaded was published"
        answers, expected = await asyncio.gather(self._proxy.logprobs(self._canary_tokens), self._canary_expected)
        self.canary = canary_difference(expected, answers, version, self._config.train.canary_tolerance)

    async def _finish_canary(self) -> None:
        """Before the next weights; what it raises ends the run at once, not here."""
        if self._checking is not None:
            with self._ledger.wait("weights"):
                await self._checking
            self._checking = None

    # -------------------------------------------------------------------------------------------------- evaluation
    def _launch_evaluation(self) -> None:
        if self._evaluation is None and self._evaluated_step != self.step:
            self._evaluated_step = self.step
            self._evaluation = self._spawn(self._evaluate(self.step))

    async def _evaluate(self, step: int) -> None:
        result = await self._evaluator.run()
        if result.version != step:
            raise WeightsError(f"the evaluation of version {step} ran on version {result.version}")
        await self._hooks.evaluated(step, result)

    async def _finish_evaluation(self) -> None:
        if self._evaluation is not None:
            with self._ledger.wait("evaluation"):
                await self._evaluation
            self._evaluation = None

    # ------------------------------------------------------------------------------------------- beginning and end
    async def _begin(self) -> None:
        """Before step 1: same parameters on both sides, same weights, first evaluation, first admissions."""
        check_parameters(await self._trainer.parameters(), await self._proxy.parameters())
        await self._load_weights()
        await self._finish_canary()
        self._step_began = asyncio.get_running_loop().time()
        self._launch_evaluation()
        self._scheduler.begin_iteration()

    async def _finish(self) -> None:
        """The last train_step ends; then a clean stop saves, and a complete run also updates and evaluates."""
        await self._finish_training()
        await self._save()
        if self._fault is not None:
            raise self._fault
        self._saved = True
        if self.stopping and not self._is_last():
            return
        await self._update()
        await self._scheduler.close()
        await self._finish_evaluation()
        self._launch_evaluation()
        await self._finish_evaluation()
        await self._finish_canary()

    async def _save(self) -> None:
        if self._saved_step != self.step:
            self._saved_step = self.step
            self._saving = asyncio.ensure_future(self._hooks.checkpoint(self.step))
        if self._saving is not None and not self._saving.done():
            with self._ledger.wait("checkpoint"):
                await asyncio.shield(self._saving)

    async def _rescue(self, error: Exception) -> None:
        """Save what is trained before `error` ends the run, unless it is the trainer that failed."""
        running = [task for task in (self._training, self._saving) if task is not None and not task.done()]
        unsaved = running or self._saved_step < self.step == self._begun
        if isinstance(error, TrainError | WorkerDied) or not unsaved:
            return
        reason = said(error).partition("\n")[0] or type(error).__name__
        self._hooks.tell(f"ending after this step, with a checkpoint: {reason}")
        try:
            async with asyncio.timeout(LAST_SAVE_S):
                if running:
                    await asyncio.wait(running)
                if self.step < self._begun:
                    await self._finish_training()
                await self._save()
        except Exception as fault:
            reason = said(fault).partition("\n")[0] or f"it took more than {LAST_SAVE_S:g} s"
            self._hooks.tell(f"no checkpoint of step {self._begun}: {reason}")

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Work of its own task; its error ends the run at once, whatever the loop is waiting for."""
        task = asyncio.get_running_loop().create_task(work)
        task.add_done_callback(self._report)
        return task

    def _report(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._supervisor.fail(error)

    async def _end(self) -> None:
        """On every way out: no task of this run is left."""
        spawned = (self._training, self._saving, self._evaluation, self._checking, self._canary_expected)
        tasks = [task for task in spawned if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._scheduler.close()

    def snapshot(self) -> dict[str, Any]:
        """What a checkpoint keeps of the control plane; pass `scheduler` to `RolloutScheduler.restore`."""
        return {"step": self.step, "scheduler": self._scheduler.snapshot()}
