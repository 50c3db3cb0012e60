"""RolloutScheduler: obeys the group book with real coroutines, and keeps the slots filled.

Invariants: every instruction of the book is obeyed once, in order; after `close` no trajectory is left. A run that
cannot go on says so through `fail`, with the last causes, and never hangs.
What it leaves out: decisions on members, slots and staleness (`group_book.py`) and on order (`task_source.py`), and
where trajectories run (`runner.py`).
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any, assert_never

import msgspec

from rollart.config import Config, limits
from rollart.control.env_manager import Services
from rollart.control.group_book import (
    Abort,
    Discard,
    Drop,
    GroupBook,
    GroupCounts,
    GroupRules,
    Instruction,
    Ready,
    Start,
)
from rollart.control.ledger import Ledger
from rollart.control.lockstep import Lockstep
from rollart.control.pacing import Pacing
from rollart.control.runner import LocalRunner, Runner, max_age
from rollart.control.sample_buffer import Batch, SampleBuffer
from rollart.control.staleness import Staleness
from rollart.control.task_source import TaskSource
from rollart.errors import RolloutError
from rollart.protocols import Recorder
from rollart.types import Group, GroupSpec, TaskSpec, Trajectory


class RolloutScheduler:
    """`fail` ends the run. `max_drops`: groups dropped in a row (default 20 batches of them) that end it.

    runner: who runs the trajectories; default: this process, with `services`.
    """

    def __init__(
        self,
        config: Config,
        tasks: Mapping[str, TaskSpec],
        source: TaskSource,
        services: Services,
        ledger: Ledger,
        recorder: Recorder,
        fail: Callable[[BaseException], None],
        max_drops: int | None = None,
        runner: Runner | None = None,
    ) -> None:
        rollout, self._plan = config.rollout, config.plan
        self._rollout = rollout
        self._source = source
        self._ledger = ledger
        self._recorder = recorder
        self._fail = fail
        self._max_drops = max_drops or 20 * rollout.groups_per_batch
        rules, self._needed_slots = _rules(config), limits(config).needed_slots
        self.book = GroupBook(rules)
        self._buffer = SampleBuffer(rules.staleness, lambda: services.proxy.version, self._evicted)
        self._runner = runner or _in_this_process(config, services, tasks)
        self._runner.listen(self)
        self._pending: deque[GroupSpec] = deque()
        self._in_hand: list[Batch] = []
        self._resumed: deque[Batch] = deque()
        self._open = False
        self._waiting = False
        self._target = 0
        self._room = rollout.engine_slots
        self._proxy = services.proxy
        self._pacing = (
            Pacing(rollout.groups_per_batch, rollout.groups_per_batch) if rollout.extra_groups == "auto" else None
        )
        self._lost_to_age = 0
        self._taken_s: float | None = None

    # --------------------------------------------------------------------------------------------- the loop's calls
    def begin_iteration(self) -> None:
        """Admit what this schedule admits after an update: one batch, or whatever the slots allow."""
        self._open = True
        if self._pacing is not None:
            self.book.held_back = self._pacing.held_back
        slots = self.book.rules.slots - self.book.held_back
        iteration = self._rollout.groups_per_batch + slots - self._needed_slots
        self._target = iteration if self._plan.admission == "iteration" else slots
        self._admit()

    async def get_batch(self) -> Batch:
        """Step 1 of the protocol: wait for a batch, and end or keep the groups that were redundant for it."""
        if self._resumed:
            return self._resumed.popleft()
        began_s = asyncio.get_running_loop().time()
        with self._ledger.waiting_for_batch():
            self._waiting = True
            try:
                self._check_progress()
                batch = await self._buffer.get_batch(self._rollout.groups_per_batch)
            finally:
                self._waiting = False
        self._take(batch)
        self._pace(began_s)
        return batch

    def begin_training(self, batch: Batch) -> None:
        """Its train_step starts, after the update that follows its get_batch. Its slots may be free now."""
        self.book.training(batch.groups)
        self._obey(())

    def trained(self, batch: Batch) -> None:
        """train_step has consumed the batch: at the latest now its slots are free."""
        self._in_hand = [each for each in self._in_hand if each is not batch]
        self.book.trained(batch.groups)
        for group in batch.groups:
            self._source.settled(group.spec)
            for trajectory in group.trajectories:
                self._recorder.trajectory(trajectory, True)
        self._obey(())

    def updated(self, version: int) -> None:
        """The workers hold a new version: end what is too old for it."""
        self._obey(self.book.updated(version))

    async def close(self) -> None:
        """Abort all trajectories and wait until they, and what they left to close, have ended."""
        self._open = False
        self._obey(self.book.abort_all())
        await self._runner.close()

    # ------------------------------------------------------------------------------------------------- checkpoints
    def snapshot(self) -> dict[str, Any]:
        """Plain data: the data position, open groups, complete groups with trajectories, batches in hand, counts.

        Call it while no train_step runs: then the groups of the batches in hand hold their slots, and fit in again.
        """
        state = {
            "source": self._source.state(),
            "open": [*self.book.open_specs(), *self._pending],
            "ready": self.book.groups("ready"),
            "in_hand": self._in_hand,
            "counts": self.book.counts,
        }
        return msgspec.to_builtins(state)  # type: ignore[no-any-return]

    def restore(self, state: Mapping[str, Any]) -> None:
        """Before the first admission: open groups run again in their order; complete ones need not."""
        self._source.restore(state["source"])
        self._pending = deque(msgspec.convert(state["open"], list[GroupSpec]))
        self._in_hand = msgspec.convert(state["in_hand"], list[Batch])
        self._resumed = deque(self._in_hand)
        ready = msgspec.convert(state["ready"], list[Group])
        in_hand = [group for batch in self._in_hand for group in batch.groups]
        self.book.restore(msgspec.convert(state["counts"], GroupCounts), ready, in_hand)
        self._buffer.put(ready)

    def live(self) -> dict[str, int]:
        """What the live view shows."""
        return {
            "running_trajectories": self.book.num_running,
            "open_groups": self.book.num_live - len(self._buffer),
            "ready_groups": len(self._buffer),
            "training_groups": self.book.num_training,
            "free_slots": self.book.free_slots,
            "extra_groups": self.book.rules.slots - self.book.held_back - self._needed_slots,
        }

    # ---------------------------------------------------------------------------------- what its runner tells it
    def progress(self, trajectory_id: str, start_version: int, num_tokens: int) -> None:
        """As `Listener.progress`."""
        self.book.progress(trajectory_id, start_version, num_tokens)

    def ended(self, trajectory: Trajectory) -> None:
        """As `Listener.ended`."""
        self._ledger.ended(trajectory)
        self._obey(self.book.finished(trajectory))

    def aborted(self, trajectory: Trajectory) -> None:
        """As `Listener.aborted`."""
        self._lose(trajectory, trajectory.stop_reason, aborted=True)

    def failed(self, error: BaseException) -> None:
        """As `Listener.failed`."""
        self._fail(error)

    # ------------------------------------------------------------------------------------------------------ inside
    def _take(self, batch: Batch) -> None:
        self._in_hand.append(batch)
        self.book.taken(batch.groups)
        iteration = self._plan.admission == "iteration"
        if iteration:
            self._target = 0
        if self._rollout.on_target == "abort" and self._pacing is None:
            needed = self._needed_slots - self._rollout.groups_per_batch
            self._obey(self.book.abort_redundant(0 if iteration else needed))

    def _pace(self, began_s: float) -> None:
        """A batch was taken that the trainer awaited since `began_s`: more groups in flight, or fewer."""
        if self._pacing is None:
            return
        now_s = asyncio.get_running_loop().time()
        if self._taken_s is not None:
            self._pacing.batch(
                waited=(now_s - began_s) / max(now_s - self._taken_s, 1e-9),
                busy=self._ledger.clock.counts["generate"] / max(1, self._room * self._proxy.num_workers),
                lost=self._lost_to_age / (self._rollout.groups_per_batch * self._rollout.group_size),
            )
        self._taken_s, self._lost_to_age = now_s, 0
        self.book.held_back = self._pacing.held_back
        self._target = self.book.rules.slots - self.book.held_back
        self._obey(())

    def _admit(self) -> None:
        while self._open and self.book.free_slots > 0 and self.book.num_live < self._target:
            spec = self._pending.popleft() if self._pending else self._source.next()
            for instruction in self.book.admit(spec):
                self._execute(instruction)

    def _obey(self, instructions: Iterable[Instruction]) -> None:
        for instruction in instructions:
            self._execute(instruction)
        self._admit()
        self._check_progress()

    def _execute(self, instruction: Instruction) -> None:
        match instruction:
            case Start(trajectory_id, spec):
                self._runner.start(trajectory_id, spec)
            case Abort(trajectory_id, reason):
                self._runner.abort(trajectory_id, reason)
            case Discard(trajectory, reason):
                self._lose(trajectory, reason, aborted=reason in ("stale", "redundant", "cancelled"))
            case Ready(group):
                self._buffer.put([group])
            case Drop():
                self._drop(instruction)
            case _:
                assert_never(instruction)

    def _drop(self, drop: Drop) -> None:
        self._buffer.discard(drop.spec.group_id)
        self._recorder.count(f"groups/{drop.outcome}")
        if drop.cause == "zero_variance":
            self._recorder.count(f"groups/zero_variance/{drop.spec.task}")
        if drop.requeue and not self._source.requeue(drop.spec):
            self._recorder.count("groups/given_up")

    def _lose(self, trajectory: Trajectory, reason: str, *, aborted: bool) -> None:
        self._ledger.lost(trajectory, reason, aborted)
        self._lost_to_age += reason == "stale"
        self._recorder.trajectory(trajectory, False)

    def _evicted(self, groups: list[Group]) -> None:
        for group in groups:
            self._obey(self.book.evicted(group))

    def _check_progress(self) -> None:
        if self.book.drops_in_a_row >= self._max_drops:
            self._fail(RolloutError(f"{self.book.drops_in_a_row} groups in a row were dropped; {self._causes()}"))
        elif self._waiting and not self.book.num_running and not self.book.num_training and self._open:
            short = self._rollout.groups_per_batch - len(self._buffer)
            if short > 0:
                state = ", ".join(f"{key} {value}" for key, value in self.live().items())
                self._fail(
                    RolloutError(
                        f"nothing runs and nothing can be admitted, but the batch lacks {short} groups "
                        f"({state}); {self._causes()}"
                    )
                )

    def _causes(self) -> str:
        causes = self.book.recent_causes.most_common(3)
        if not causes:
            return "no group was dropped since the last complete one"
        return "most frequent causes: " + "; ".join(f"{cause} ({count} times)" for cause, count in causes)


def _in_this_process(config: Config, services: Services, tasks: Mapping[str, TaskSpec]) -> LocalRunner:
    lockstep = Lockstep() if config.plan.lockstep else None
    return LocalRunner(services, tasks, max_age(config), lockstep, score_together=not config.plan.async_reward)


def _rules(config: Config) -> GroupRules:
    rollout, derived = config.rollout, limits(config)
    replace = rollout.zero_variance == "replace"
    return GroupRules(
        slots=derived.slots,
        group_size=rollout.group_size,
        staleness=Staleness.of(derived.alpha, rollout.groups_per_batch),
        extra_members=rollout.extra_members,
        member_retries=rollout.member_retries,
        max_replaced=math.floor(rollout.replace_limit * rollout.groups_per_batch) if replace else 0,
        recheck_running=config.plan.recheck == "turn",
        held_until=rollout.free_slots,
    )
