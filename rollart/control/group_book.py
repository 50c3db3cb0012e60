"""Who is running for whom: the book of groups, their members and their slots. PURE: events in, instructions out.

A group runs `group_size + extra_members` members; the first `group_size` that finish make it, the others are aborted as
redundant. A member that fails or grows stale runs again inside its group; a group that can no longer be completed is
dropped whole.

A group is running, ready (complete), taken (in a batch that `get_batch` gave) and training, in this order. Its slot is
held from admission until it is dropped, aborted or trained, or only until its training starts (`held_until`).

Invariants, asserted by `check()`: every admitted group ends exactly once, as trained, dropped or aborted; the slots
held are those of the groups that are there, but for those in training where these hold none, and never more than all;
one batch is in training at a time; no trajectory id is used twice; nothing is trained twice.

Why nothing is born stale (paper section 5), counting batches from 0. Batch k is taken while the workers hold version
k - 1 (0 for the first). Then they are updated to version k, and then its training starts. Let a group be admitted when
the slots of R batches, 0 to R - 1, are free.

    born       The update to version R - 1 came before the training of batch R - 1 started, and so before its slots were
               free: the group starts under version R - 1 at least.
    consumed   It is one of at most (alpha + 1) x B groups that hold a slot, all of them for batch R or later. In FIFO
               order it is in batch R + alpha at the latest, which is taken at version R + alpha - 1.

So its age is at most alpha. The proof asks only that the training of a batch starts after its update, so both values of
`held_until` have this bound: no update lies between start and end of a training. Of a fractional alpha, the last
ceil(fraction x B) of those groups may be one batch later and one version older, which is the quota of `Staleness` (up
to rounding). Where rollout and training alternate, a batch is admitted after an update and consumed before the next:
its age is 0.

A run that resumes with batch k in hand holds version k before it admits anything. Batch k holds its slots then, as no
training runs when a checkpoint is written, and is trained first: R = k, and after that R = k + 1, as above. Without a
batch in hand batch k is taken one version later than before, and what is then too old is found by `updated`, as are
groups that were overtaken and the redundant ones beyond those slots. A train_step that fails ends the run, so that
nothing is born after it; one that began is finished when a run is to stop.

What it leaves out: tasks of asyncio, the data order, and how ready groups are chosen (`sample_buffer.py`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Literal, NoReturn

from msgspec import Struct, field

from rollart.control.staleness import Staleness
from rollart.types import ABORTED, FAILED, Group, GroupSpec, StopReason, Trajectory

Outcome = Literal["trained", "dropped", "aborted"]
State = Literal["running", "ready", "taken", "training"]


# ---------------------------------------------------------------------------------------------------- instructions
class Start(Struct, frozen=True):
    """Run one trajectory."""

    trajectory_id: str
    spec: GroupSpec
    attempt: int


class Abort(Struct, frozen=True):
    """End a running trajectory: nobody wants it."""

    trajectory_id: str
    reason: StopReason


class Discard(Struct, frozen=True):
    """A trajectory that ended will not be trained on."""

    trajectory: Trajectory
    reason: str


class Ready(Struct, frozen=True):
    """A group is complete."""

    group: Group


class Drop(Struct, frozen=True):
    """A group has ended untrained; all its members were aborted or discarded before. `requeue`: try its task again."""

    spec: GroupSpec
    cause: str
    requeue: bool
    outcome: Outcome


Instruction = Start | Abort | Discard | Ready | Drop


# ------------------------------------------------------------------------------------------------------------- state
class GroupRules(Struct, frozen=True):
    """What the book must know of a run. `max_replaced`: zero-variance groups replaced per batch.

    `recheck_running`: running members that are too old are found at every update (`Schedule.recheck == "turn"`).
    `held_until`: when at the latest a group gives back its slot (`rollout.free_slots`).
    """

    slots: int
    group_size: int
    staleness: Staleness
    extra_members: int = 0
    member_retries: int = 2
    max_replaced: int = 0
    recheck_running: bool = True
    held_until: Literal["train_start", "train_end"] = "train_end"


class _Member(Struct):
    number: int
    trajectory_id: str = ""
    attempt: int = 0
    start_version: int | None = None
    num_tokens: int = 0
    trajectory: Trajectory | None = None
    lost: bool = False

    @property
    def running(self) -> bool:
        return self.trajectory is None and not self.lost


class _Entry(Struct):
    spec: GroupSpec
    members: list[_Member]
    state: State = "running"

    @property
    def live(self) -> bool:
        """Neither in a batch, nor over."""
        return self.state in ("running", "ready")

    def finished(self) -> list[Trajectory]:
        return [member.trajectory for member in self.members if member.trajectory is not None]

    def age(self, version: int) -> int:
        starts = [member.start_version for member in self.members if member.start_version is not None]
        return version - min(starts, default=version)

    def preference(self) -> tuple[bool, int, int, int]:
        """Sorts what deserves to be kept first: ready, then most advanced, then first admitted."""
        tokens = sum(member.num_tokens for member in self.members)
        return self.state != "ready", -len(self.finished()), -tokens, self.spec.index


class GroupCounts(Struct):
    """What happened so far; plain data for checkpoints and the live view."""

    admitted: int = 0
    zero_variance: int = 0
    ends: dict[str, int] = field(default_factory=lambda: {"trained": 0, "dropped": 0, "aborted": 0})
    causes: dict[str, int] = field(default_factory=dict)


class GroupBook:
    """The state machine. Every method that returns a list wants its instructions obeyed in order."""

    def __init__(self, rules: GroupRules) -> None:
        self.rules = rules
        self.held_back = 0
        """Slots that nobody may take now."""
        self.counts = GroupCounts()
        self.drops_in_a_row = 0
        self.recent_causes: Counter[str] = Counter()
        self._entries: dict[str, _Entry] = {}
        self._running: dict[str, tuple[_Entry, _Member]] = {}
        self._replaced = 0
        self._num_taken = 0
        self._num_training = 0

    # ----------------------------------------------------------------------------------------------------- queries
    @property
    def free_slots(self) -> int:
        """Groups that may be admitted now."""
        return max(0, self.rules.slots - self.held_back - self.slots_held)

    @property
    def slots_held(self) -> int:
        """Slots that groups hold."""
        freed = self._num_training if self.rules.held_until == "train_start" else 0
        return len(self._entries) - freed

    @property
    def num_running(self) -> int:
        """Trajectories that run."""
        return len(self._running)

    @property
    def num_training(self) -> int:
        """Groups that the trainer has, or will have next."""
        return self._num_taken + self._num_training

    @property
    def num_live(self) -> int:
        """Groups that run or are ready."""
        return len(self._entries) - self.num_training

    def open_specs(self) -> list[GroupSpec]:
        """Groups that are not complete, in order of admission."""
        return [entry.spec for entry in self._entries.values() if entry.state == "running"]

    def groups(self, state: Literal["ready", "taken", "training"]) -> list[Group]:
        """Complete groups in that state, in order of admission."""
        return [Group(entry.spec, entry.finished()) for entry in self._entries.values() if entry.state == state]

    # ------------------------------------------------------------------------------------------------------ events
    def admit(self, spec: GroupSpec) -> list[Instruction]:
        """Take a slot and start all members."""
        entry = self._add(spec, _Entry(spec, [_Member(n) for n in range(self._group_width)]))
        return [self._start(entry, member) for member in entry.members]

    def progress(self, trajectory_id: str, start_version: int, num_tokens: int) -> None:
        """A trajectory asks for its first generation (`start_version` is then a lower bound), or has ended a turn."""
        if found := self._running.get(trajectory_id):
            found[1].start_version, found[1].num_tokens = start_version, num_tokens

    def finished(self, trajectory: Trajectory) -> list[Instruction]:
        """A trajectory has ended by itself. Unknown ids were aborted before, and are ignored."""
        found = self._running.pop(trajectory.trajectory_id, None)
        if found is None:
            return []
        entry, member = found
        if (reason := _untrainable(trajectory)) is not None:
            return [Discard(trajectory, trajectory.stop_reason), *self._again(entry, member, reason)]
        member.trajectory = trajectory
        member.start_version, member.num_tokens = trajectory.start_version, trajectory.num_generated_tokens
        return self._complete(entry) if len(entry.finished()) == self.rules.group_size else []

    def updated(self, version: int) -> list[Instruction]:
        """The workers hold a new version: re-run the members, and drop the ready groups, that are too old for it."""
        live = sorted((entry for entry in self._entries.values() if entry.live), key=_Entry.preference)
        stale = self.rules.staleness.stale((entry.spec.group_id, entry.age(version)) for entry in live)
        return [each for group_id in stale for each in self._stale(self._entries[group_id], version)]

    def evicted(self, group: Group) -> list[Instruction]:
        """The buffer found a ready group too old."""
        return self._end(self._find(group, "ready"), "dropped", "stale", requeue=True)

    def taken(self, groups: Iterable[Group]) -> None:
        """They are the trainer's next batch; the one after it may replace zero-variance groups again."""
        for group in groups:
            self._find(group, "ready").state = "taken"
            self._num_taken += 1
        self._replaced = 0

    def training(self, groups: Iterable[Group]) -> None:
        """Their train_step starts, under the weights that all workers hold by now."""
        if self._num_training:
            _broken(f"a batch is to be trained while {self._num_training} groups are in training")
        for group in groups:
            self._find(group, "taken").state = "training"
            self._num_taken -= 1
            self._num_training += 1

    def trained(self, groups: Iterable[Group]) -> None:
        """train_step has consumed them."""
        for group in groups:
            entry = self._find(group, "training")
            del self._entries[entry.spec.group_id]
            self._num_training -= 1
            self.counts.ends["trained"] += 1

    def abort_redundant(self, keep: int) -> list[Instruction]:
        """The batch is full: abort unfinished groups, first admitted first, until `keep` untrained ones are left."""
        running = [entry for entry in self._entries.values() if entry.state == "running"]
        surplus = max(0, self.num_live - keep)
        return [each for entry in running[:surplus] for each in self._end(entry, "aborted", "redundant", requeue=False)]

    def abort_all(self) -> list[Instruction]:
        """The run ends: abort everything that is in no batch."""
        live = [entry for entry in self._entries.values() if entry.live]
        return [each for entry in live for each in self._end(entry, "aborted", "cancelled", requeue=False)]

    def restore(self, counts: GroupCounts, ready: Sequence[Group], taken: Sequence[Group]) -> None:
        """Enter groups that a checkpoint kept complete; those that were open are admitted anew by the caller."""
        self.counts = counts
        counts.admitted = sum(counts.ends.values())
        for group in (*taken, *ready):
            members = [
                _Member(n, each.trajectory_id, 0, each.start_version, each.num_generated_tokens, each)
                for n, each in enumerate(group.trajectories)
            ]
            self._add(group.spec, _Entry(group.spec, members, "ready"))
        self.taken(taken)

    # ------------------------------------------------------------------------------------------------------- inside
    @property
    def _group_width(self) -> int:
        return self.rules.group_size + self.rules.extra_members

    def _add(self, spec: GroupSpec, entry: _Entry) -> _Entry:
        if self.free_slots < 1 or spec.group_id in self._entries:
            _broken(f"group {spec.group_id} admitted {'twice' if self.free_slots else 'without a free slot'}")
        self._entries[spec.group_id] = entry
        self.counts.admitted += 1
        return entry

    def _find(self, group: Group, state: str) -> _Entry:
        entry = self._entries.get(group.spec.group_id)
        if entry is None or entry.state != state:
            _broken(f"group {group.spec.group_id} is {entry.state if entry else 'over'}, not {state}")
        return entry

    def _start(self, entry: _Entry, member: _Member) -> Start:
        member.trajectory_id = f"{entry.spec.group_id}-m{member.number}-a{member.attempt}"
        member.start_version, member.num_tokens, member.trajectory = None, 0, None
        self._running[member.trajectory_id] = (entry, member)
        return Start(member.trajectory_id, entry.spec, member.attempt)

    def _again(self, entry: _Entry, member: _Member, reason: str) -> list[Instruction]:
        member.attempt += 1
        if member.attempt <= self.rules.member_retries:
            return [self._start(entry, member)]
        member.lost, member.trajectory, member.start_version = True, None, None
        if sum(not each.lost for each in entry.members) >= self.rules.group_size:
            return []
        return self._end(entry, "dropped", reason, requeue=True)

    def _complete(self, entry: _Entry) -> list[Instruction]:
        aborts: list[Instruction] = [self._abort(each, "redundant") for each in entry.members if each.running]
        entry.members = [member for member in entry.members if member.trajectory is not None]
        trajectories = entry.finished()
        if self._replaced < self.rules.max_replaced and _zero_variance(trajectories):
            self._replaced += 1
            self.counts.zero_variance += 1
            return [*aborts, *self._end(entry, "dropped", "zero_variance", requeue=False)]
        entry.state = "ready"
        self.drops_in_a_row = 0
        self.recent_causes.clear()
        return [*aborts, Ready(Group(entry.spec, trajectories))]

    def _stale(self, entry: _Entry, version: int) -> list[Instruction]:
        if entry.state == "ready":
            return self._end(entry, "dropped", "stale", requeue=True)
        if not self.rules.recheck_running:
            return []
        instructions: list[Instruction] = []
        for member in entry.members:
            if member.start_version is None or version - member.start_version <= self.rules.staleness.whole:
                continue
            ended = member.trajectory
            instructions.append(Discard(ended, "stale") if ended else self._abort(member, "stale"))
            instructions += self._again(entry, member, "stale")
            if entry.spec.group_id not in self._entries:
                break
        return instructions

    def _abort(self, member: _Member, reason: StopReason) -> Abort:
        del self._running[member.trajectory_id]
        return Abort(member.trajectory_id, reason)

    def _end(self, entry: _Entry, outcome: Outcome, cause: str, requeue: bool) -> list[Instruction]:
        reason: StopReason = "redundant" if cause == "redundant" else "cancelled"
        aborts = [self._abort(each, reason) for each in entry.members if each.trajectory_id in self._running]
        loss = cause if cause in ("stale", "redundant", "cancelled", "zero_variance") else "group_dropped"
        discards = [Discard(trajectory, loss) for trajectory in entry.finished()]
        del self._entries[entry.spec.group_id]
        self.counts.ends[outcome] += 1
        kind = cause.partition(":")[0]
        self.counts.causes[kind] = self.counts.causes.get(kind, 0) + 1
        if requeue:
            self.drops_in_a_row += 1
            self.recent_causes[cause] += 1
        return [*aborts, *discards, Drop(entry.spec, cause, requeue, outcome)]

    # ------------------------------------------------------------------------------------------------------- check
    def check(self) -> None:
        """Assert the invariants of the module docstring."""
        states = Counter(entry.state for entry in self._entries.values())
        assert (states["taken"], states["training"]) == (self._num_taken, self._num_training)
        held = states.total() - (states["training"] if self.rules.held_until == "train_start" else 0)
        assert held == self.slots_held <= self.rules.slots, f"slots leak: {held} of {self.rules.slots} are held"
        assert self.counts.admitted == sum(self.counts.ends.values()) + len(self._entries), "a group ended not once"
        for entry in self._entries.values():
            if entry.state != "running":
                assert len(entry.finished()) == len(entry.members) == self.rules.group_size
                continue
            assert len(entry.finished()) < self.rules.group_size
            assert sum(not member.lost for member in entry.members) >= self.rules.group_size
        members = [
            (member.trajectory_id, entry, member)
            for entry in self._entries.values()
            for member in entry.members
            if member.running
        ]
        assert len(members) == len(self._running), "a running trajectory belongs to no open group"
        assert all(self._running[name] == (entry, member) for name, entry, member in members)


def _untrainable(trajectory: Trajectory) -> str | None:
    """Why a trajectory that ended cannot be trained on, or None."""
    if trajectory.stop_reason in FAILED | ABORTED:
        return f"{trajectory.stop_reason}: {trajectory.cause}" if trajectory.cause else trajectory.stop_reason
    if trajectory.num_generated_tokens == 0:
        return f"no token was generated ({trajectory.stop_reason})"
    return None


def _zero_variance(trajectories: Sequence[Trajectory]) -> bool:
    return len(trajectories) > 1 and len({trajectory.reward for trajectory in trajectories}) == 1


def _broken(what: str) -> NoReturn:
    raise AssertionError(what)
