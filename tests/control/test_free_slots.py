"""When a batch's slots are free: at both moments nothing is born stale, over the book alone and over whole runs."""

from __future__ import annotations

import asyncio
import math
from typing import Literal

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from rollart.config import limits
from rollart.control.group_book import Abort, Discard, Drop, GroupBook, GroupRules, Instruction, Ready, Start
from rollart.control.sample_buffer import ReadyGroups, start_version
from rollart.control.staleness import Staleness
from rollart.types import Group, GroupSpec
from rollart.virtual_time import run_virtual
from tests.control.test_group_book import trajectory
from tests.control.test_sharding import trained as sharded
from tests.control.test_training_loop import trained
from tests.fakes import FakeEnv, FakeRun, share

Moment = Literal["train_start", "train_end"]
MOMENTS: tuple[Moment, ...] = ("train_start", "train_end")
SIZE = 2


class TheProtocol(RuleBasedStateMachine):
    """Continuous admission, and the steps of the loop in their order, with anything in between.

    Where groups end in the order of their admission and none is redundant, nothing ever grows stale. Else what grows
    stale is found, and nothing older than alpha is trained.
    """

    @initialize(
        alpha=st.sampled_from([0.25, 0.5, 1.0, 1.5, 2.0, 2.75]),
        batch=st.sampled_from([1, 2, 4]),
        extra=st.integers(0, 3),
        extra_members=st.integers(0, 1),
        in_order=st.booleans(),
        until=st.sampled_from(MOMENTS),
    )
    def begin(self, alpha: float, batch: int, extra: int, extra_members: int, in_order: bool, until: Moment) -> None:
        self.staleness, self.batch, self.in_order = Staleness.of(alpha, batch), batch, in_order
        slots = math.ceil((alpha + 1) * batch) + extra
        self.rules = GroupRules(slots, SIZE, self.staleness, extra_members, member_retries=1, held_until=until)
        self.never_stale = in_order and not extra and (alpha * batch).is_integer()
        self.version = self.trainings = self.trained = self.admitted = self.ended = 0
        self.born: dict[str, int] = {}
        self.taken: list[Group] = []
        self.training: list[Group] = []
        self.open(GroupBook(self.rules))
        self.admit()

    def open(self, book: GroupBook) -> None:
        self.book, self.ready = book, ReadyGroups(self.staleness)
        self.running: dict[str, Start] = {}
        self.started: dict[str, int] = {}
        self.pending: list[GroupSpec] = []

    # ------------------------------------------------------------------------------------------------------ rollout
    @precondition(lambda self: self.running)
    @rule()
    def first_group_ends(self) -> None:
        first = next(iter(self.running.values())).spec
        while members := [each for each in self.running.values() if each.spec == first]:
            self.finish(members[0])

    @precondition(lambda self: self.running and not self.in_order)
    @rule(data=st.data(), fails=st.sampled_from([False, False, True]))
    def any_member_ends(self, data: st.DataObject, fails: bool) -> None:
        start = self.running[data.draw(st.sampled_from(sorted(self.running)))]
        self.finish(start, fails)

    @precondition(lambda self: set(self.running) - set(self.started))
    @rule()
    def first_requests(self) -> None:
        for name in self.running:
            if name not in self.started:
                self.ask(name)

    # --------------------------------------------------------------------------------------------- the loop's steps
    @precondition(lambda self: not self.taken)
    @rule()
    def get_batch(self) -> None:
        for group in self.ready.evict(self.version):
            assert not self.never_stale, f"{group.spec.group_id} was born stale"
            self.obey(self.book.evicted(group))
        self.admit()
        if (groups := self.ready.take(self.batch)) is None:
            return
        ages = [self.version - start_version(group) for group in groups]
        assert max(ages) <= self.staleness.oldest
        assert sum(age > self.staleness.whole for age in ages) <= self.staleness.quota
        assert all(start_version(group) >= self.born[group.spec.group_id] for group in groups)
        self.book.taken(groups)
        self.taken = groups
        self.admit()

    @precondition(lambda self: self.training)
    @rule()
    def train_step_ends(self) -> None:
        self.book.trained(self.training)
        self.ended += len(self.training)
        self.training, self.trained = [], self.trained + 1
        self.admit()

    @precondition(lambda self: self.taken and not self.training)
    @rule()
    def update_and_train_step(self) -> None:
        self.update()
        self.book.training(self.taken)
        self.training, self.taken = self.taken, []
        self.trainings += 1
        self.admit()

    @precondition(lambda self: not self.training)
    @rule()
    def resume(self) -> None:
        """A checkpoint, and a new run from it, which holds the newest weights before it admits anything."""
        self.never_stale = self.never_stale and bool(self.taken)
        before, opened = self.book, self.book.open_specs()
        ready = before.groups("ready")
        assert before.groups("taken") == sorted(self.taken, key=lambda group: group.spec.index)
        self.open(GroupBook(self.rules))
        self.book.restore(before.counts, ready, self.taken)
        for group in ready:
            self.ready.add(group)
        self.pending = opened
        self.update()

    def update(self) -> None:
        if self.version != self.trained:
            self.version = self.trained
            self.obey(self.book.updated(self.version))
        self.admit()

    # ---------------------------------------------------------------------------------------------- what must hold
    @invariant()
    def holds(self) -> None:
        if not hasattr(self, "book"):
            return
        self.book.check()
        assert self.book.free_slots == 0, "a slot stays free"
        assert self.admitted - self.ended <= self.rules.slots + self.batch
        if self.rules.held_until == "train_start":
            assert self.book.num_live + len(self.taken) == self.rules.slots

    def teardown(self) -> None:
        if not hasattr(self, "book"):
            return
        self.obey(self.book.abort_all())
        assert not self.running
        self.book.trained(self.training)
        assert self.book.num_training == len(self.taken)
        assert self.admitted == self.ended + len(self.training) + len(self.taken)

    # ------------------------------------------------------------------------------------------------------- inside
    def admit(self) -> None:
        """As many as there are slots: each starts under the weights of now, or later."""
        while self.book.free_slots:
            spec = self.pending.pop(0) if self.pending else None
            if spec is None:
                spec = GroupSpec(self.admitted, "task", self.admitted)
                self.admitted += 1
            self.born[spec.group_id] = max(0, self.trainings - 1)
            self.obey(self.book.admit(spec))
            for name in [each for each, start in self.running.items() if start.spec == spec][: spec.index % 3]:
                self.ask(name)

    def ask(self, name: str) -> None:
        self.started[name] = self.version
        self.book.progress(name, self.version, 1)

    def finish(self, start: Start, fails: bool = False) -> None:
        version = self.started.pop(start.trajectory_id, self.version)
        del self.running[start.trajectory_id]
        self.obey(self.book.finished(trajectory(start, version, 0.0, "env_error" if fails else "done")))
        self.admit()

    def obey(self, instructions: list[Instruction]) -> None:
        for each in instructions:
            match each:
                case Start(trajectory_id):
                    self.running[trajectory_id] = each
                case Abort(trajectory_id, reason):
                    assert not (self.never_stale and reason == "stale"), f"{trajectory_id} was born stale"
                    del self.running[trajectory_id]
                    self.started.pop(trajectory_id, None)
                case Discard(ended, reason):
                    assert not (self.never_stale and reason == "stale"), f"{ended.trajectory_id} was born stale"
                case Ready(group):
                    self.ready.add(group)
                case Drop(spec):
                    self.ready.discard(spec.group_id)
                    self.ended += 1


TestTheProtocol = TheProtocol.TestCase
TestTheProtocol.settings = settings(max_examples=100, stateful_step_count=60)


# ----------------------------------------------------------------------------------------------------------- whole runs
def irregular(request: object) -> int:
    """Few long answers among many short ones."""
    return 1 + int(share(request.request_id) ** 4 * 60)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"schedule": "areal"},
        {"alpha": 0.5},
        {"alpha": 2.25},
        {"rollout__extra_groups": 3},
        {"rollout__extra_groups": 3, "rollout__on_target": "keep"},
        {"rollout__extra_members": 1},
        {"rollout__extra_groups": "auto"},
        {"rollout__zero_variance": "replace", "env": FakeEnv(reward=lambda env_id: float(share(env_id) > 0.7))},
    ],
    ids=lambda options: " ".join(options) or "plain",
)
@pytest.mark.parametrize("moment", MOMENTS)
def test_whatever_is_redundant_nothing_too_old_is_trained_and_no_slot_leaks(
    moment: Moment, options: dict[str, object]
) -> None:
    async def main() -> FakeRun:
        run = FakeRun(
            **{"num_tokens": irregular, "train_s": 0.4, "steps": 25, "rollout__groups_per_batch": 4, **options},  # type: ignore[arg-type]
            rollout__free_slots=moment,
        )
        watching = asyncio.ensure_future(watch(run))
        try:
            return await run.train()
        finally:
            watching.cancel()

    run = run_virtual(main())
    assert len(run.hooks.summaries) == 25
    assert max(run.ages) <= run.scheduler.book.rules.staleness.oldest


async def watch(run: FakeRun) -> None:
    """At many moments: the book holds, and no more is in memory than was said before."""
    book, bounds = run.scheduler.book, limits(run.config)
    while True:
        await asyncio.sleep(0.07)
        book.check()
        assert book.num_live + book.num_training <= bounds.groups_in_memory
        assert book.num_running <= bounds.trajectories_in_flight


@pytest.mark.parametrize(("moment", "live"), [("train_start", {4}), ("train_end", {2})])
def test_while_a_batch_trains_others_have_its_slots_or_wait_for_its_end(moment: Moment, live: set[int]) -> None:
    seen: set[int] = set()

    async def look(run: FakeRun) -> None:
        while True:
            await asyncio.sleep(1.0)
            if run.scheduler.book.groups("training") and not run.scheduler.book.groups("taken"):
                seen.add(run.scheduler.book.num_live)

    async def main() -> None:
        run = FakeRun(train_s=10.0, rollout__free_slots=moment, num_tokens=lambda request: 70)
        looking = asyncio.ensure_future(look(run))
        await run.train()
        looking.cancel()

    run_virtual(main())
    assert seen == live


def test_a_trainer_waits_less_where_slots_are_free_when_training_starts() -> None:
    waits = {}
    for moment in MOMENTS:
        run = trained(num_tokens=irregular, train_s=4.0, steps=20, rollout__free_slots=moment)
        waits[moment] = run.trainer.spans[-1][1] - run.trainer.spans[0][1]
    assert waits["train_start"] < waits["train_end"]


@pytest.mark.parametrize("before", MOMENTS)
@pytest.mark.parametrize("after", MOMENTS)
@pytest.mark.parametrize(("train_s", "in_hand"), [(2.0, 0), (40.0, 1)])
def test_a_run_goes_on_from_a_checkpoint_with_either_moment(
    before: Moment, after: Moment, train_s: float, in_hand: int
) -> None:
    """With a batch in hand or without: nothing is lost, nothing is trained twice, nothing too old."""
    options = {"num_tokens": irregular, "train_s": train_s, "steps": 12}

    async def main() -> tuple[FakeRun, FakeRun]:
        first = FakeRun(**options, rollout__free_slots=before)  # type: ignore[arg-type]
        saved: list[bytes] = []
        first.hooks.on_checkpoint = lambda step: saved.append(msgspec.msgpack.encode(first.scheduler.snapshot()))
        asyncio.get_running_loop().call_later(3.9 * train_s + 5, first.loop.request_stop)
        await first.train()
        state = msgspec.msgpack.decode(saved[-1])
        assert len(state["in_hand"]) == in_hand
        second = FakeRun(**options, rollout__free_slots=after, start_step=first.loop.step)  # type: ignore[arg-type]
        second.scheduler.restore(state)
        second.scheduler.book.check()
        return first, await second.train()

    first, second = run_virtual(main())
    assert 0 < first.loop.step < 12
    assert [summary.step for summary in second.hooks.summaries] == list(range(first.loop.step + 1, 13))
    indices = [g.spec.index for run in (first, second) for batch in run.trainer.batches for g in batch.groups]
    assert len(indices) == len(set(indices)) == 24
    assert set(first.trained_specs + second.trained_specs) <= {first.source.draw(n) for n in range(60)}


@pytest.mark.parametrize("moment", MOMENTS)
def test_shards_change_nothing_about_it(moment: Moment) -> None:
    run = sharded(rollout__free_slots=moment, num_tokens=irregular, steps=15, train_s=0.4, rollout__extra_groups="auto")
    assert len(run.hooks.summaries) == 15
    assert run.scheduler.book.counts.ends["trained"] == 30


def test_a_train_step_that_fails_ends_the_run_with_its_slots_taken_by_others() -> None:
    async def main() -> FakeRun:
        run = FakeRun(rollout__free_slots="train_start", train_s=4.0)
        run.trainer.fail_at = 2
        with pytest.raises(RuntimeError, match="out of memory in train_step"):
            await run.train()
        return run

    run = run_virtual(main())
    counts = run.scheduler.book.counts
    assert counts.ends["trained"] == 2
    assert counts.admitted == sum(counts.ends.values()) + run.scheduler.book.num_training
