"""Where time goes, and how old what was trained is.

`StageClock` counts trajectories by stage. While a batch is awaited and the trainer has nothing else to do, every second
is attributed to the stages of the running trajectories in proportion to their number, integrated at each change. Where
training overlaps rollout, the next batch is awaited while the trainer works: that is no wait. `Ledger` adds the other
waits, the histograms of age and lag, aborted trajectories by cause, the length bias of redundancy, and overlap.

Invariant: the seconds attributed to stages (and to `nothing_running`, `no_engine`) add up to the time spent in
`waiting_for_batch` without a train_step or another wait at the same time. What it leaves out: storing and showing any
of it.
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from rollart.control.sample_buffer import Batch
from rollart.types import EngineStats, Trajectory

STAGES = ("reset", "generate", "step", "score")
IDLE = "nothing_running"
NO_ENGINE = "no_engine"
"""Trajectories generate, but there is no inference worker."""
COUNTERS = ("ages", "lags", "aborted", "discarded")


class StageClock:
    """Trajectories per stage, and the waits attributed to them. Each change costs O(1)."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = dict.fromkeys(STAGES, 0)
        self.num_running = 0
        self.waited_s: dict[str, float] = dict.fromkeys((*STAGES, IDLE, NO_ENGINE), 0.0)
        self.rollout_waited_s = 0.0
        self._has_engine = True
        self._batch_awaited = False
        self._training = False
        self._num_other = 0
        self._since = 0.0

    def change(self, before: str | None, after: str | None) -> None:
        """A trajectory goes from one stage to the next; None is outside."""
        if self._batch_awaited or self._training:
            self._integrate()
        if before is not None:
            self.counts[before] -= 1
            self.num_running -= 1
        if after is not None:
            self.counts[after] += 1
            self.num_running += 1

    def shift(self, before: Mapping[str, int], after: Mapping[str, int]) -> None:
        """Trajectories of another process were in the stages `before`, and are in the stages `after`."""
        if self._batch_awaited or self._training:
            self._integrate()
        for stage in self.counts:
            change = after.get(stage, 0) - before.get(stage, 0)
            self.counts[stage] += change
            self.num_running += change

    def engines(self, number: int) -> None:
        """So many inference workers are there from now on."""
        self._integrate()
        self._has_engine = number > 0

    def await_batch(self, waiting: bool) -> None:
        """The trainer begins or ends to wait for a batch."""
        self._integrate()
        self._batch_awaited = waiting

    def train(self, training: bool) -> None:
        """train_step begins or ends; while it runs and no trajectory does, the rollout waits for it."""
        self._integrate()
        self._training = training

    def other(self, change: int) -> None:
        """One more wait of another cause than a batch, or (-1) one less."""
        self._integrate()
        self._num_other += change

    def _integrate(self) -> None:
        now = asyncio.get_running_loop().time()
        passed_s, self._since = now - self._since, now
        if self._training and not self.num_running:
            self.rollout_waited_s += passed_s
        if not self._batch_awaited or self._training or self._num_other:
            return
        if not self.num_running:
            self.waited_s[IDLE] += passed_s
            return
        for stage, count in self.counts.items():
            if count:
                cause = NO_ENGINE if stage == "generate" and not self._has_engine else stage
                self.waited_s[cause] += passed_s * count / self.num_running


class Ledger:
    """All accounts of one run."""

    def __init__(self) -> None:
        self.clock = StageClock()
        self.ages: Counter[int] = Counter()
        self.lags: Counter[int] = Counter()
        self.aborted: Counter[str] = Counter()
        self.discarded: Counter[str] = Counter()
        self._waits_s: defaultdict[str, float] = defaultdict(float)
        self._train_s = 0.0
        self._generating_s = 0.0
        self._kept = _Lengths()
        self._finished = _Lengths()
        self._redundant = _Lengths()

    # ------------------------------------------------------------------------------------------------------- waits
    @contextmanager
    def wait(self, cause: str) -> Iterator[None]:
        """Book the time inside as a wait: weights, suspended, evaluation, checkpoint."""
        loop = asyncio.get_running_loop()
        begin = loop.time()
        self.clock.other(1)
        try:
            yield
        finally:
            self.clock.other(-1)
            self._waits_s[cause] += loop.time() - begin

    @contextmanager
    def waiting_for_batch(self) -> Iterator[None]:
        """Attribute the time inside to the stages of the running trajectories."""
        self.clock.await_batch(True)
        try:
            yield
        finally:
            self.clock.await_batch(False)

    @contextmanager
    def training(self) -> Iterator[None]:
        """train_step runs."""
        self.clock.train(True)
        try:
            yield
        finally:
            self.clock.train(False)

    def overlapped(self, seconds: float, before: Mapping[str, EngineStats], after: Mapping[str, EngineStats]) -> None:
        """A train_step took `seconds`; how much of it did the workers generate?"""
        busy_s = [after[name].busy_s - before[name].busy_s for name in after if name in before]
        if not busy_s or seconds <= 0:
            return
        self._train_s += seconds
        self._generating_s += sum(min(max(each, 0.0), seconds) for each in busy_s) / len(busy_s)

    # ------------------------------------------------------------------------------------------------ trajectories
    def trained(self, batch: Batch, num_steps_done: int) -> None:
        """A batch goes into train_step: its ages at `get_batch`, its lags behind the learner."""
        for group in batch.groups:
            for trajectory in group.trajectories:
                start = trajectory.start_version
                assert start is not None, "a trajectory without generated tokens is never trained"
                self.ages[batch.version - start] += 1
                self.lags[num_steps_done - start] += 1
                self._kept.add(trajectory)

    def ended(self, trajectory: Trajectory) -> None:
        """A trajectory has ended by itself."""
        self._finished.add(trajectory)

    def lost(self, trajectory: Trajectory, reason: str, aborted: bool) -> None:
        """A trajectory that nobody will train on; `aborted` where it was still wanted a moment ago."""
        (self.aborted if aborted else self.discarded)[reason] += 1
        if aborted and reason == "redundant":
            self._redundant.add(trajectory)

    # ------------------------------------------------------------------------------------------- checkpoints, snapshot
    def state(self) -> dict[str, Any]:
        """Plain data that `restore` reads back."""
        return {
            **{name: dict(getattr(self, name)) for name in COUNTERS},
            "stages_s": dict(self.clock.waited_s),
            "rollout_waited_s": self.clock.rollout_waited_s,
            "waits_s": dict(self._waits_s),
            "train_s": self._train_s,
            "generating_s": self._generating_s,
            "lengths": [[each.num, each.tokens] for each in (self._kept, self._finished, self._redundant)],
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on with the accounts of the run that is resumed."""
        for name in COUNTERS:
            getattr(self, name).update(state[name])
        self.clock.waited_s.update(state["stages_s"])
        self.clock.rollout_waited_s = state["rollout_waited_s"]
        self._waits_s.update(state["waits_s"])
        self._train_s, self._generating_s = state["train_s"], state["generating_s"]
        self._kept, self._finished, self._redundant = (_Lengths(*pair) for pair in state["lengths"])

    @property
    def overlap(self) -> float:
        """Share of training time during which tokens were generated, the mean over workers; 0 to 1."""
        return self._generating_s / self._train_s if self._train_s else 0.0

    def snapshot(self) -> dict[str, Any]:
        """Plain data. `waits_s`: the trainer's waits by cause, and `training`, the rollout's wait for the trainer.

        `tokens_*_mean`: generated tokens per trajectory that was trained, that finished, and that was aborted as
        redundant (what it had by its last whole turn). Kept far below the others means: redundancy favours the short.
        """
        return {
            "waits_s": {**self.clock.waited_s, **self._waits_s, "training": self.clock.rollout_waited_s},
            "age_histogram": _sorted(self.ages),
            "lag_histogram": _sorted(self.lags),
            "aborted": dict(self.aborted),
            "discarded": dict(self.discarded),
            "overlap": self.overlap,
            "train_s": self._train_s,
            "tokens_kept_mean": self._kept.mean,
            "tokens_finished_mean": self._finished.mean,
            "tokens_redundant_mean": self._redundant.mean,
            "running": dict(self.clock.counts),
        }


class _Lengths:
    def __init__(self, num: int = 0, tokens: int = 0) -> None:
        self.num = num
        self.tokens = tokens

    def add(self, trajectory: Trajectory) -> None:
        self.num += 1
        self.tokens += trajectory.num_generated_tokens

    @property
    def mean(self) -> float:
        return self.tokens / self.num if self.num else 0.0


def _sorted(histogram: Counter[int]) -> dict[str, int]:
    return {str(key): histogram[key] for key in sorted(histogram)}
