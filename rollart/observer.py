"""What a run leaves behind and shows: the training loop's hooks, written to the run folder and the console.

Invariant: a result is on disk before the next one is made; nothing here can end a run except a fault of its own code.
What this file leaves out: how files and the screen are written (`run_folder.py`, `console.py`).
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from msgspec import Struct, field

from rollart.checkpoint import Checkpoints, ControlState
from rollart.config import Config, limits
from rollart.console import View
from rollart.control.evaluator import EvalResult, TaskResult
from rollart.control.ledger import Ledger
from rollart.control.llm_proxy import LLMProxy
from rollart.control.rollout_scheduler import RolloutScheduler
from rollart.control.training_loop import StepSummary
from rollart.data.reward import RemoteReward
from rollart.data.serverless.meter import Usage as FunctionUsage
from rollart.errors import RunFolderError
from rollart.metrics import Metrics, RewardStatus, Status, TaskStatus
from rollart.run_folder import RunFolder
from rollart.types import FAILED, EngineStats, Trajectory
from rollart.usage import Usage
from rollart.window import Sample, window

REFRESH_S = 0.5
WINDOW_S = 20.0
REWARDS_S = 2.0
"""How often the reward workers are asked what they did."""
COLLAPSED = 0.9
"""Share of empty answers in a batch from which the policy has collapsed."""


class Totals(Struct):
    """Counts of the whole run, kept across resumes."""

    wall_s: float = 0.0
    train_loop_s: float = 0.0
    cpu_s: float = 0.0
    trajectories: int = 0
    tokens: int = 0
    skipped_steps: int = 0
    canary_max: float = 0.0
    peak_rss_bytes: int = 0
    first: dict[str, TaskResult] = field(default_factory=dict)
    last: dict[str, TaskResult] = field(default_factory=dict)


class Observer:
    """Implements `LoopHooks`, and refreshes the live view until it is cancelled."""

    def __init__(
        self,
        config: Config,
        folder: RunFolder,
        view: View,
        checkpoints: Checkpoints,
        scheduler: RolloutScheduler,
        proxy: LLMProxy,
        ledger: Ledger,
        metrics: Metrics,
        usage: Usage,
        save_trainer: Callable[[str], Awaitable[None]],
        resources: Callable[[], Struct],
        totals: Totals,
        step: int,
        began: float,
        reward: RemoteReward | None = None,
    ) -> None:
        self._config, self._folder, self._view = config, folder, view
        self._checkpoints, self._save_trainer, self._resources = checkpoints, save_trainer, resources
        self._scheduler, self._proxy, self._ledger = scheduler, proxy, ledger
        self._metrics, self._usage, self.totals = metrics, usage, totals
        self._earlier = (totals.wall_s, totals.train_loop_s, totals.cpu_s)
        self._began = began
        self._reward = reward
        self.rewards: dict[str, FunctionUsage] = {}
        self.values: dict[str, float] = {}
        self._told = 0.0
        self._in_trouble: set[str] = set()
        self._step = self._first_step = step
        self._loop_began = time.monotonic()
        self._loss: float | None = None
        self._phase = "evaluation"
        self._collapsed = False
        self._tasks: dict[str, TaskStatus] = {name: TaskStatus() for name in config.tasks}
        self._samples: deque[Sample] = deque()
        self._stages: dict[str, float] = {}
        self._no_engine_s = 0.0

    # -------------------------------------------------------------------------------------------------------- hooks
    async def step_done(self, summary: StepSummary) -> None:
        """Metrics and, now and then, some trajectories."""
        report, batch = summary.report, summary.batch
        trajectories = [trajectory for group in batch.groups for trajectory in group.trajectories]
        self._step, self._loss, self._phase = summary.step, report.loss, "training"
        self.totals.trajectories += len(trajectories)
        self.totals.tokens += report.trained_tokens
        self.totals.skipped_steps += report.skipped
        self.totals.canary_max = max(self.totals.canary_max, summary.canary)
        if report.skipped:
            self._folder.note(f"step {summary.step} was skipped: loss or gradient is not finite")
        values = {**self._metrics.flush(), **self._step_values(summary)}
        self._folder.write_metrics(summary.step, values)
        self.values.update(values)
        self._folder.write_batch(summary.step, batch.groups, batch.version)
        self._update_tasks(values)
        self._look_for_collapse(summary.step, trajectories)
        every = self._config.log.trajectories_every
        if every and summary.step % every == 0:
            self._folder.write_trajectories(summary.step, self._some(trajectories))
        self._show()

    async def checkpoint(self, step: int) -> None:
        """Save; a checkpoint that cannot be written is a warning, the older ones stay."""
        await self._ask_rewards(0.0)
        self._phase = "saving"
        self._clock()
        state = ControlState(
            step=step,
            version=step,
            scheduler=self._scheduler.snapshot(),
            totals=_plain(self.totals),
            ledger=self._ledger.state(),
        )
        try:
            await self._checkpoints.write(state, self._save_trainer)
        except RunFolderError as error:
            self._folder.note(str(error))
        self._phase = "training"

    async def evaluated(self, step: int, result: EvalResult) -> None:
        """Held-out success, per task."""
        values: dict[str, float] = {}
        for name, task in result.tasks.items():
            self.totals.first.setdefault(name, task)
            self.totals.last[name] = task
            values |= {f"eval/{name}/{key}": getattr(task, key) for key in ("success", "reward", "turns", "tokens")}
            if task.failed:
                self._folder.note(_failures(name, task, result.trajectories))
        self._folder.write_metrics(step, values)
        self.values.update(values)
        self._folder.write_trajectories(step, self._some(result.trajectories), label="eval")
        line = ", ".join(
            f"{name} success {task.success:.2f} reward {task.reward:.3f}" for name, task in result.tasks.items()
        )
        self.tell(f"evaluation after step {step}: {line}")
        self._update_tasks({})

    def tell(self, line: str) -> None:
        """Shown and logged."""
        self._folder.log(line)
        self._view.say(line)

    # ------------------------------------------------------------------------------------------------------ showing
    async def watch(self) -> None:
        """Refresh the view and the usage figures until cancelled."""
        while True:
            self._usage.sample()
            self._take_sample(await self._proxy.stats())
            await self._ask_rewards()
            self._show()
            await asyncio.sleep(REFRESH_S)

    async def _ask_rewards(self, every_s: float = REWARDS_S) -> None:
        if self._reward is not None and time.monotonic() - self._told >= every_s:
            self._told = time.monotonic()
            self.rewards = await self._reward.usage()
            self._tell_trouble()

    def _tell_trouble(self) -> None:
        """Say once, until it is over, that an endpoint is down: trajectories wait for it."""
        now = {name: usage.trouble for name, usage in self.rewards.items() if usage.trouble}
        for name in now.keys() - self._in_trouble:
            self._folder.note(f"the reward function of task {name!r} cannot be reached, calls wait: {now[name]}")
        self._in_trouble = set(now)

    def _show(self) -> None:
        live = self._scheduler.live()
        derived = limits(self._config)
        first, last = (self._samples[0], self._samples[-1]) if self._samples else (None, None)
        self._view.update(
            Status(
                step=self._step,
                steps=self._config.steps,
                phase=self._phase,
                folder=str(self._folder.path),
                schedule=self._config.schedule,
                alpha=derived.alpha,
                version=self._proxy.version,
                elapsed_s=time.monotonic() - self._began,
                eta_s=self._eta_s(),
                tasks=self._tasks,
                loss=self._loss,
                running={stage: count for stage, count in self._ledger.clock.counts.items() if count},
                ready_groups=live["ready_groups"],
                groups_per_batch=self._config.rollout.groups_per_batch,
                free_slots=live["free_slots"],
                slots=derived.slots,
                ages=dict(self._ledger.ages),
                aborted=dict(self._ledger.aborted),
                rewards={name: _reward_status(usage) for name, usage in self.rewards.items()},
                **(window(first, last) if first and last and last.at > first.at else {}),
            )
        )

    def _eta_s(self) -> float | None:
        done = self._step - self._first_step
        if done < 1:
            return None
        return (time.monotonic() - self._loop_began) / done * (self._config.steps - self._step)

    def _take_sample(self, stats: dict[str, EngineStats]) -> None:
        now = time.monotonic()
        account = self._ledger.snapshot()
        if self._samples:
            passed_s = now - self._samples[-1].at
            self._no_engine_s += 0.0 if stats else passed_s
            counts = self._ledger.clock.counts if self._ledger.clock.num_running else {"training": 1}
            for stage, count in counts.items():
                self._stages[stage] = self._stages.get(stage, 0.0) + count * passed_s
        self._samples.append(
            Sample(
                at=now,
                generated=sum(each.generated_tokens for each in stats.values()),
                trajectories=int(sum(task.trajectories for task in self._tasks.values())),
                busy_s=sum(each.busy_s for each in stats.values()) / max(1, len(stats)),
                train_s=account["train_s"],
                waits_s=account["waits_s"],
                stages=dict(self._stages),
                no_engine_s=self._no_engine_s,
            )
        )
        while self._samples[-1].at - self._samples[0].at > WINDOW_S:
            self._samples.popleft()

    def _look_for_collapse(self, step: int, trajectories: list[Trajectory]) -> None:
        """Say once when the policy has learned to say nothing."""
        turns = [turn for trajectory in trajectories for turn in trajectory.turns]
        empty = sum(not turn.action_text.strip() for turn in turns)
        if empty > COLLAPSED * len(turns) and not self._collapsed:
            self._collapsed = True
            self._folder.note(
                f"step {step}: {empty} of {len(turns)} answers are empty; the policy may have collapsed: look at the "
                "rewards, or lower train.learning_rate"
            )

    def _update_tasks(self, values: dict[str, float]) -> None:
        for name, task in self._tasks.items():
            first, last = self.totals.first.get(name), self.totals.last.get(name)
            self._tasks[name] = TaskStatus(
                reward=values.get(f"reward/{name}", task.reward),
                success=values.get(f"success/{name}", task.success),
                trajectories=task.trajectories + int(values.get(f"trajectories/{name}", 0)),
                **successes(first, last),
            )

    # ----------------------------------------------------------------------------------------------------- figures
    def _step_values(self, summary: StepSummary) -> dict[str, float]:
        report, account = summary.report, self._ledger.snapshot()
        ages = [
            summary.batch.version - (each.start_version or 0)
            for group in summary.batch.groups
            for each in group.trajectories
        ]
        return {
            "train/loss": report.loss,
            "train/grad_norm": report.grad_norm,
            "train/learning_rate": report.learning_rate,
            "train/tokens": report.trained_tokens,
            "train/seconds": report.seconds,
            "train/skipped": float(report.skipped),
            **{f"train/{key}": value for key, value in report.metrics.items()},
            "canary": summary.canary,
            "version": summary.version,
            "step_seconds": summary.seconds,
            "age/mean": sum(ages) / max(1, len(ages)),
            "age/max": float(max(ages, default=0)),
            "overlap": account["overlap"],
            **{f"wait/{cause}": seconds for cause, seconds in account["waits_s"].items()},
            **{
                f"function/{task}/{key}": float(getattr(usage, key))
                for task, usage in self.rewards.items()
                for key in ("processes", "utilisation", "queue_s", "busy_s", "allocated_s", "cost")
            },
        }

    def _some(self, trajectories: list[Trajectory]) -> list[Trajectory]:
        wanted = self._config.log.trajectories
        return [
            each
            for name in self._config.tasks
            for each in [trajectory for trajectory in trajectories if trajectory.task == name][:wanted]
        ]

    def _clock(self) -> None:
        self._usage.sample()
        wall_s, train_loop_s, cpu_s = self._earlier
        self.totals.wall_s = wall_s + time.monotonic() - self._began
        self.totals.train_loop_s = train_loop_s + time.monotonic() - self._loop_began
        self.totals.cpu_s = cpu_s + self._usage.cpu_s
        self.totals.peak_rss_bytes = max(self.totals.peak_rss_bytes, self._usage.peak_rss_bytes)

    def summary(self, outcome: str) -> dict[str, Any]:
        """What `summary.json` holds; `outcome`: completed, stopped, or the error that ended the run."""
        self._clock()
        totals, account, prefill = self.totals, self._ledger.snapshot(), self._proxy.prefill.report()
        return {
            "outcome": outcome,
            "tasks": {name: _first_and_last(totals, name) for name in self._config.tasks},
            "steps": self._step,
            "trajectories": totals.trajectories,
            "tokens": totals.tokens,
            "wall_s": totals.wall_s,
            "cpu_s": totals.cpu_s,
            "train_loop_s": totals.train_loop_s,
            "peak_rss_bytes": totals.peak_rss_bytes,
            "alpha": self._config.effective_alpha,
            "schedule": self._config.schedule,
            "seed": self._config.seed,
            "skipped_steps": totals.skipped_steps,
            "canary_max": totals.canary_max,
            "groups": _plain(self._scheduler.book.counts),
            "resources": msgspec.to_builtins(self._resources()),
            "affinity": _plain(self._proxy.affinity()),
            **({"prefill": _plain(prefill)} if prefill is not None else {}),
            "rewards": {name: usage.facts() for name, usage in self.rewards.items()},
            **account,
        }


def _first_and_last(totals: Totals, name: str) -> dict[str, float]:
    first, last = totals.first.get(name), totals.last.get(name)
    if first is None or last is None:
        return {}
    return {
        "success_first": first.success,
        "success_last": last.success,
        "reward_first": first.reward,
        "reward_last": last.reward,
        "turns_last": last.turns,
        "tokens_last": last.tokens,
        "episodes": last.episodes,
    }


def successes(first: TaskResult | None, last: TaskResult | None) -> dict[str, float]:
    """What a `TaskStatus` shows of the first and the latest evaluation; one alone is not shown as two."""
    shown = {"eval_first": first.success} if first is not None and first != last else {}
    return {**shown, "eval_last": last.success} if last is not None else {}


def _reward_status(usage: FunctionUsage) -> RewardStatus:
    return RewardStatus(
        processes=usage.processes,
        utilisation=usage.utilisation,
        calls=usage.calls,
        failures=sum(usage.failures.values()),
        latency_s=usage.quantile(0.5),
        cost=usage.cost,
    )


def _failures(name: str, task: TaskResult, trajectories: list[Trajectory]) -> str:
    failed = [each for each in trajectories if each.task == name and each.stop_reason in FAILED]
    (cause, _), *_ = Counter(each.cause for each in failed).most_common(1)
    return (
        f"evaluation: {task.failed} of {task.episodes} episodes of task {name!r} failed, most often because of {cause}"
    )


def _plain(value: Struct) -> dict[str, Any]:
    return msgspec.to_builtins(value)  # type: ignore[no-any-return]
