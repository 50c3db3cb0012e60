"""Random events over the group book and the buffer of ready groups; then the rules one by one."""

from __future__ import annotations

from typing import Literal

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from rollart.control.group_book import (
    Abort,
    Discard,
    Drop,
    GroupBook,
    GroupRules,
    Instruction,
    Ready,
    Start,
)
from rollart.control.sample_buffer import ReadyGroups, start_version
from rollart.control.staleness import Staleness
from rollart.types import Group, GroupSpec, StopReason, Trajectory, Turn


def trajectory(
    start: Start, version: int | None = 0, reward: float = 0.0, stop_reason: StopReason = "done"
) -> Trajectory:
    """A finished trajectory of two tokens; of none where `version` is None."""
    versions = [] if version is None else [version, version]
    turn = Turn([1], versions, [0.0] * len(versions), versions)
    return Trajectory(
        start.trajectory_id, start.spec.group_id, start.spec.task, start.spec.seed, [turn], reward, stop_reason
    )


class AnyOrderOfEvents(RuleBasedStateMachine):
    """Whatever happens in whatever order: one end per group and per trajectory, no leak, nothing too old trained."""

    @initialize(
        alpha=st.sampled_from([0.0, 0.5, 1.0, 1.5, 2.0]),
        batch=st.integers(1, 4),
        size=st.integers(1, 3),
        extra=st.integers(0, 2),
        retries=st.integers(0, 2),
        replaced=st.integers(0, 2),
        recheck=st.booleans(),
        until=st.sampled_from(["train_start", "train_end"]),
    )
    def begin(
        self,
        alpha: float,
        batch: int,
        size: int,
        extra: int,
        retries: int,
        replaced: int,
        recheck: bool,
        until: Literal["train_start", "train_end"],
    ) -> None:
        staleness = Staleness.of(alpha, batch)
        self.book = GroupBook(GroupRules(2 * batch + 2, size, staleness, extra, retries, replaced, recheck, until))
        self.ready = ReadyGroups(staleness)
        self.batch, self.version, self.admitted = batch, 0, 0
        self.running: dict[str, Start] = {}
        self.started: set[str] = set()
        self.fates: dict[str, str] = {}
        self.group_ends: dict[str, str] = {}
        self.taken: list[list[Group]] = []
        self.training: list[Group] = []

    # --------------------------------------------------------------------------------------------- what may happen
    @precondition(lambda self: self.book.free_slots > 0)
    @rule()
    def admit(self) -> None:
        self.obey(self.book.admit(GroupSpec(self.admitted, "task", self.admitted)))
        self.admitted += 1

    @precondition(lambda self: self.running)
    @rule(data=st.data(), age=st.integers(0, 3), tokens=st.integers(0, 9))
    def progress(self, data: st.DataObject, age: int, tokens: int) -> None:
        self.book.progress(self.pick(data).trajectory_id, max(0, self.version - age), tokens)

    @precondition(lambda self: self.running)
    @rule(
        data=st.data(),
        age=st.integers(0, 3),
        reward=st.integers(0, 1),
        reason=st.sampled_from(["done", "done", "done", "turn_limit", "env_error", "stale", "generation_error"]),
        empty=st.integers(0, 9),
    )
    def finish(self, data: st.DataObject, age: int, reward: int, reason: StopReason, empty: int) -> None:
        start = self.pick(data)
        del self.running[start.trajectory_id]
        version = None if empty == 0 else max(0, self.version - age)
        ended = trajectory(start, version, float(reward), reason)
        self.obey(self.book.finished(ended))
        assert self.book.finished(ended) == [], "an event that comes twice changes nothing"

    @rule()
    def update(self) -> None:
        self.version += 1
        self.obey(self.book.updated(self.version))

    @rule()
    def take(self) -> None:
        for group in self.ready.evict(self.version):
            self.obey(self.book.evicted(group))
        if (groups := self.ready.take(self.batch)) is None:
            return
        ages = [self.version - start_version(group) for group in groups]
        rules = self.book.rules.staleness
        assert max(ages) <= rules.oldest
        assert sum(age > rules.whole for age in ages) <= rules.quota
        self.book.taken(groups)
        self.taken.append(groups)

    @precondition(lambda self: self.taken and not self.training)
    @rule()
    def begin_training(self) -> None:
        self.training = self.taken.pop(0)
        self.book.training(self.training)
        for groups in self.taken:
            with pytest.raises(AssertionError, match="groups are in training"):
                self.book.training(groups)

    @precondition(lambda self: self.training)
    @rule()
    def train(self) -> None:
        groups, self.training = self.training, []
        self.book.trained(groups)
        for group in groups:
            self.end_group(group.spec, "trained")
            for each in group.trajectories:
                self.end_trajectory(each.trajectory_id, "trained")

    @rule(keep=st.integers(0, 8))
    def abort_redundant(self, keep: int) -> None:
        before = self.book.num_live
        self.obey(self.book.abort_redundant(keep))
        assert self.book.num_live == max(min(keep, before), len(self.ready))

    # ---------------------------------------------------------------------------------------------- what must hold
    @invariant()
    def holds(self) -> None:
        if not hasattr(self, "book"):
            return
        self.book.check()
        assert self.book.num_running == len(self.running)
        held = self.admitted - len(self.group_ends)
        held -= len(self.training) if self.book.rules.held_until == "train_start" else 0
        assert self.book.slots_held == self.book.rules.slots - self.book.free_slots == held
        assert self.book.num_training == len(self.training) + sum(map(len, self.taken))
        assert self.book.num_live == self.admitted - len(self.group_ends) - self.book.num_training

    def teardown(self) -> None:
        if not hasattr(self, "book"):
            return
        self.obey(self.book.abort_all())
        while self.training or self.taken:
            if self.training:
                self.train()
            else:
                self.begin_training()
        assert len(self.group_ends) == self.admitted, "a group never ended"
        assert set(self.fates) == self.started, "a trajectory never ended"
        assert self.book.free_slots == self.book.rules.slots
        assert sum(self.book.counts.ends.values()) == self.admitted

    # ------------------------------------------------------------------------------------------------------ inside
    def pick(self, data: st.DataObject) -> Start:
        return self.running[data.draw(st.sampled_from(sorted(self.running)))]

    def obey(self, instructions: list[Instruction]) -> None:
        for each in instructions:
            match each:
                case Start(trajectory_id):
                    assert trajectory_id not in self.started, "an id is used twice"
                    self.started.add(trajectory_id)
                    self.running[trajectory_id] = each
                case Abort(trajectory_id, reason):
                    del self.running[trajectory_id]
                    self.end_trajectory(trajectory_id, reason)
                case Discard(ended, reason):
                    self.end_trajectory(ended.trajectory_id, reason)
                case Ready(group):
                    assert len(group.trajectories) == self.book.rules.group_size
                    self.ready.add(group)
                case Drop(spec):
                    self.ready.discard(spec.group_id)
                    self.end_group(spec, each.outcome)

    def end_trajectory(self, trajectory_id: str, fate: str) -> None:
        assert trajectory_id not in self.fates, f"{trajectory_id} ended as {self.fates[trajectory_id]} and {fate}"
        self.fates[trajectory_id] = fate

    def end_group(self, spec: GroupSpec, end: str) -> None:
        assert spec.group_id not in self.group_ends
        self.group_ends[spec.group_id] = end


TestAnyOrderOfEvents = AnyOrderOfEvents.TestCase
TestAnyOrderOfEvents.settings = settings(max_examples=80, stateful_step_count=60)


# ------------------------------------------------------------------------------------------------- the rules, singly
def book(**rules: object) -> GroupBook:
    options = {"slots": 4, "group_size": 2, "staleness": Staleness.of(1.0, 2), **rules}
    return GroupBook(GroupRules(**options))  # type: ignore[arg-type]


def starts(instructions: list[Instruction]) -> list[Start]:
    return [each for each in instructions if isinstance(each, Start)]


def test_the_first_members_that_finish_make_the_group_and_the_rest_is_redundant() -> None:
    b = book(extra_members=1)
    first, second, third = starts(b.admit(GroupSpec(0, "t", 7)))
    assert b.finished(trajectory(third, reward=1.0)) == []
    instructions = b.finished(trajectory(first))
    assert instructions[0] == Abort(second.trajectory_id, "redundant")
    assert isinstance(instructions[1], Ready)
    assert [t.trajectory_id for t in instructions[1].group.trajectories] == [first.trajectory_id, third.trajectory_id]


def test_a_failed_member_runs_again_until_its_retries_are_used_up() -> None:
    b = book(member_retries=1)
    first, second = starts(b.admit(GroupSpec(0, "t", 7)))
    discard, again = b.finished(trajectory(first, stop_reason="env_error"))
    assert isinstance(discard, Discard)
    assert again == Start("g0-m0-a1", first.spec, 1)
    instructions = b.finished(trajectory(again, stop_reason="env_error"))
    assert instructions[1] == Abort(second.trajectory_id, "cancelled")
    assert instructions[2] == Drop(first.spec, "env_error", requeue=True, outcome="dropped")
    assert b.free_slots == 4


def test_a_lost_member_does_not_drop_a_group_that_others_can_complete() -> None:
    b = book(extra_members=1, member_retries=0)
    first, second, third = starts(b.admit(GroupSpec(0, "t", 7)))
    assert len(b.finished(trajectory(first, stop_reason="reward_error"))) == 1
    b.finished(trajectory(second))
    assert isinstance(b.finished(trajectory(third))[-1], Ready)


def test_a_trajectory_without_generated_tokens_counts_as_failed() -> None:
    b = book(member_retries=0)
    first, _ = starts(b.admit(GroupSpec(0, "t", 7)))
    assert isinstance(b.finished(trajectory(first, version=None))[-1], Drop)
    assert b.counts.causes == {"no token was generated (done)": 1}


def test_zero_variance_groups_are_replaced_up_to_the_limit_per_batch() -> None:
    b = book(max_replaced=1)
    ends = []
    for index in range(3):
        first, second = starts(b.admit(GroupSpec(index, "t", index)))
        b.finished(trajectory(first, reward=1.0))
        ends.append(b.finished(trajectory(second, reward=1.0))[-1])
    assert isinstance(ends[0], Drop)
    assert not ends[0].requeue
    assert [type(end) for end in ends[1:]] == [Ready, Ready]
    b.taken([end.group for end in ends[1:]])
    first, second = starts(b.admit(GroupSpec(9, "t", 9)))
    b.finished(trajectory(first, reward=1.0))
    assert isinstance(b.finished(trajectory(second, reward=1.0))[-1], Drop)


def test_only_the_members_that_are_too_old_run_again() -> None:
    b = book()
    old, young = starts(b.admit(GroupSpec(0, "t", 7)))
    b.progress(old.trajectory_id, 0, 5)
    b.progress(young.trajectory_id, 1, 5)
    assert b.updated(1) == []
    assert b.updated(2) == [Abort(old.trajectory_id, "stale"), Start("g0-m0-a1", old.spec, 1)]


def test_a_finished_member_that_grows_too_old_is_discarded_and_runs_again() -> None:
    b = book()
    old, _ = starts(b.admit(GroupSpec(0, "t", 7)))
    ended = trajectory(old, version=0)
    b.finished(ended)
    assert b.updated(2) == [Discard(ended, "stale"), Start("g0-m0-a1", old.spec, 1)]


def test_running_members_are_left_alone_where_only_starts_are_checked() -> None:
    b = book(recheck_running=False)
    for start in starts(b.admit(GroupSpec(0, "t", 7))):
        b.progress(start.trajectory_id, 0, 5)
    assert b.updated(5) == []


def test_the_quota_of_a_fractional_alpha_goes_to_ready_groups_then_to_the_most_advanced() -> None:
    b = book(staleness=Staleness.of(0.5, 4), group_size=1)
    groups = [starts(b.admit(GroupSpec(index, "t", index)))[0] for index in range(4)]
    for tokens, start in zip((1, 9, 4, 0), groups, strict=True):
        b.progress(start.trajectory_id, 0, tokens)
    b.finished(trajectory(groups[3]))
    aborted = [each.trajectory_id for each in b.updated(1) if isinstance(each, Abort)]
    assert aborted == [groups[2].trajectory_id, groups[0].trajectory_id]


@pytest.mark.parametrize(("until", "free"), [("train_start", [0, 0, 2, 2]), ("train_end", [0, 0, 0, 2])])
def test_slots_are_free_when_training_starts_or_when_it_has_ended(
    until: Literal["train_start", "train_end"], free: list[int]
) -> None:
    b = book(group_size=1, held_until=until)
    ends = [b.finished(trajectory(start))[-1] for n in range(4) for start in starts(b.admit(GroupSpec(n, "t", n)))]
    groups = [each.group for each in ends[:2] if isinstance(each, Ready)]
    found = [b.free_slots]
    for event in (b.taken, b.training, b.trained):
        event(groups)
        b.check()
        found.append(b.free_slots)
    assert found == free
    assert (b.num_live, b.counts.ends["trained"]) == (2, 2)


def test_what_no_batch_holds_is_neither_trained_nor_aborted_twice() -> None:
    b = book(group_size=1, held_until="train_start")
    end = b.finished(trajectory(starts(b.admit(GroupSpec(0, "t", 7)))[0]))[-1]
    assert isinstance(end, Ready)
    for event, state in ((b.training, "ready, not taken"), (b.trained, "ready, not training")):
        with pytest.raises(AssertionError, match=f"group g0 is {state}"):
            event([end.group])
    b.taken([end.group])
    b.training([end.group])
    assert b.abort_all() == []
    assert b.updated(99) == []
    b.trained([end.group])
    with pytest.raises(AssertionError, match="group g0 is over, not training"):
        b.trained([end.group])


def test_drops_in_a_row_are_counted_with_their_causes_until_a_group_is_ready() -> None:
    b = book(member_retries=0)
    for index in range(3):
        first, _ = starts(b.admit(GroupSpec(index, "t", index)))
        b.finished(trajectory(first, stop_reason="env_error"))
    assert (b.drops_in_a_row, b.recent_causes.most_common()) == (3, [("env_error", 3)])
    first, second = starts(b.admit(GroupSpec(3, "t", 3)))
    b.finished(trajectory(first))
    b.finished(trajectory(second))
    assert (b.drops_in_a_row, not b.recent_causes) == (0, True)
