"""Which device class generates for which task: as declared, or (`auto`) decided and decided again by measurement. PURE.

    explore   the first trajectories of a task go to every class in turn, later ones now and then; nothing is decided
              for a task before it has been measured on every class in enough turns over enough time (`turn_profile.py`)
    predict   seconds per turn of the whole mixture under an assignment of tasks to classes
    decide    the best assignment, for all tasks together: the class that a task likes best may be full with another
    stay      unless the gain is above a margin, twice in a row; what a dead class had moves at once

The prediction is the pessimistic bound of a closed queueing network (Zahorjan et al., Balanced job bound analysis,
CACM 1982) with N requests in flight: (R + (N - 1) x D) / N, where R is a mean turn's seconds without waiting, and D the
work that it leaves on the busiest class: per worker its prefill, and its decoding divided by the slots that share it.

Invariant: every task that is mapped, is mapped to a class with a worker, as long as there is any. Time comes in with
the measurements alone. What this file leaves out: the measuring (`turn_profile.py`) and the workers (`routing.py`).
"""

from __future__ import annotations

import itertools
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

from msgspec import Struct

from rollart.resource.turn_profile import ENOUGH, Profile
from rollart.types import GenResult

EXPLORED = ENOUGH
"""Trajectories of each task that every class gets first."""
PROBE_UNKNOWN, PROBE_KNOWN = 8, 128
"""Every so many-th trajectory tries the least tried class: while some class is not measured, and from then on."""
MAX_TRIED = 512
"""Assignments up to which all are compared; beyond it a search by single moves and swaps."""
CHANGES_KEPT = 100
ASSUMED_SLOTS = 64
ANY = "any class"
"""In a change: a task that is no longer mapped."""

Assignment = Mapping[str, str]


class Change(Struct, frozen=True):
    """A task's class was chosen anew. `at_s`: seconds after the first measurement."""

    at_s: float
    tag: str
    device_class: str
    before: str | None
    reason: str

    def __str__(self) -> str:
        return f"affinity: {self.tag} -> {self.device_class}: {self.reason}"


class AffinityReport(Struct, frozen=True):
    """For `summary.json`; times are seconds. `fallbacks`: trajectories by "tag: wanted -> served (cause)".

    `unmeasured`: requests whose engine gave no times, from which "auto" learns nothing.
    """

    mode: str
    mapping: dict[str, str]
    profile: dict[str, dict[str, object]]
    changes: list[Change]
    fallbacks: dict[str, int]
    unmeasured: int


class Affinity:
    """Tag -> device class, in `mapping`.

    declared: where it begins; with mode "auto" empty. slots: requests that one engine runs at once.
    margin: predicted gain from which tasks move. Decisions are at least `every` requests and `every_s` seconds apart.
    """

    def __init__(
        self,
        declared: Mapping[str, str] | None = None,
        mode: Literal["declared", "auto"] = "declared",
        slots: int = ASSUMED_SLOTS,
        margin: float = 0.1,
        every: int = 32,
        every_s: float = 2.0,
    ) -> None:
        self.mapping: dict[str, str] = dict(declared or {})
        self.profile = Profile()
        self.changes: deque[Change] = deque(maxlen=CHANGES_KEPT)
        self._auto = mode == "auto"
        self._slots, self._margin, self._every, self._every_s = slots, margin, every, every_s
        self._workers: Counter[str] = Counter()
        self._tried: dict[str, Counter[str]] = {}
        self._since = 0
        self._began_s: float | None = None
        self._now_s = self._decided_s = 0.0
        self._better: Assignment | None = None

    # ----------------------------------------------------------------------------------------------------- workers
    @property
    def classes(self) -> list[str]:
        """Those with a worker."""
        return sorted(self._workers)

    def joined(self, device_class: str) -> list[Change]:
        """A worker of a class is there. A class that comes back is considered at once."""
        self._workers[device_class] += 1
        return self._decide(patient=False) if self._workers[device_class] == 1 else []

    def left(self, device_class: str) -> list[Change]:
        """A worker is gone; with the last one of a class, its tasks move."""
        self._workers[device_class] -= 1
        if self._workers[device_class]:
            return []
        del self._workers[device_class]
        return self._decide(patient=False)

    # ---------------------------------------------------------------------------------------------------- requests
    def wish(self, tag: str) -> str | None:
        """The class that a new trajectory should try; None leaves it to the mapping."""
        classes = self.classes
        if not self._auto or len(classes) < 2:
            return None
        tried = self._tried.setdefault(tag, Counter())
        tried[""] += 1
        least = min(classes, key=lambda name: tried[name])
        often = PROBE_KNOWN if self.profile.knows(tag, classes) else PROBE_UNKNOWN
        if tried[least] >= EXPLORED and tried[""] % often:
            return None
        tried[least] += 1
        return least

    def observe(
        self, tag: str, device_class: str, num_prompt_tokens: int, result: GenResult, in_flight: int, now_s: float
    ) -> list[Change]:
        """A request has ended on a class, with `in_flight` there. What changes by it, already in `mapping`."""
        self.profile.observe(tag, device_class, num_prompt_tokens, result, in_flight, now_s)
        if self._began_s is None:
            self._began_s = self._decided_s = now_s
        self._now_s = now_s
        self._since += 1
        new = self._auto and tag not in self.mapping and self.profile.knows(tag, self.classes)
        due = self._since >= self._every and now_s - self._decided_s >= self._every_s
        return self._decide(patient=True) if new or due else []

    # --------------------------------------------------------------------------------------------------- decisions
    def _decide(self, patient: bool) -> list[Change]:
        """`patient`: a better assignment must win twice before anybody moves."""
        self._since, self._decided_s = 0, self._now_s
        classes = self.classes
        orphans = [tag for tag, name in self.mapping.items() if name not in self._workers]
        if not self._auto or not classes or (len(classes) < 2 and not orphans):
            return []
        tags = [tag for tag in self.profile.tags if self.profile.knows(tag, classes)]
        costs = _Costs(self.profile, tags, self._workers, self._slots)
        settled = {tag: self.mapping[tag] for tag in tags if self.mapping.get(tag) in classes}
        kept = costs.best([tag for tag in tags if tag not in settled], settled)
        best = costs.best(tags, {})
        gain = costs.seconds(kept) / costs.seconds(best) - 1 if tags else 0.0
        if gain <= self._margin:
            self._better = None
        elif patient and settled and self._better != best:
            self._better = best
        else:
            self._better, kept = None, best
        return self._move(kept, costs) + self._let_go([tag for tag in orphans if tag not in kept])

    def _move(self, chosen: Assignment, costs: _Costs) -> list[Change]:
        moved = {tag: name for tag, name in chosen.items() if self.mapping.get(tag) != name}
        changes = [
            self._change(tag, name, costs.reason(tag, chosen, self.mapping.get(tag))) for tag, name in moved.items()
        ]
        self.mapping |= moved
        return changes

    def _let_go(self, orphans: Sequence[str]) -> list[Change]:
        """Tasks whose class died, and that are not measured on all of the others."""
        changes = [self._change(tag, ANY, _lost(self.mapping[tag])) for tag in orphans]
        for tag in orphans:
            del self.mapping[tag]
        return changes

    def _change(self, tag: str, device_class: str, reason: str) -> Change:
        change = Change(self._now_s - (self._began_s or 0.0), tag, device_class, self.mapping.get(tag), reason)
        self.changes.append(change)
        return change

    def report(self, fallbacks: Mapping[str, int]) -> AffinityReport:
        """What was measured and decided so far."""
        mode = "auto" if self._auto else "declared" if self.mapping else "none"
        return AffinityReport(
            mode=mode,
            mapping=dict(self.mapping),
            profile=self.profile.report(),
            changes=list(self.changes),
            fallbacks=dict(fallbacks),
            unmeasured=self.profile.unmeasured,
        )

    def check(self) -> None:
        """Assert the invariants."""
        assert all(number > 0 for number in self._workers.values())
        if self._auto and self._workers:
            assert set(self.mapping.values()) <= set(self._workers)


class _Costs:
    """Predictions for one moment's profile."""

    def __init__(self, profile: Profile, tags: Sequence[str], workers: Mapping[str, int], slots: int) -> None:
        self._workers, self._slots = dict(workers), max(1, slots)
        self._num = max(1.0, profile.in_flight)
        self._share = {tag: profile.share(tag) for tag in tags}
        self._turn = {(tag, name): profile.turn(tag, name) for tag in tags for name in workers}

    def seconds(self, chosen: Assignment) -> float:
        """Per turn of the mixture, all workers together (the formula on top)."""
        alone_s, work_s = 0.0, dict.fromkeys(self._workers, 0.0)
        for tag, name in chosen.items():
            turn, share = self._turn[tag, name], self._share[tag]
            alone_s += share * turn.seconds
            work_s[name] += share * (turn.prefill_s + turn.decode_s / self._slots) / self._workers[name]
        return (alone_s + (self._num - 1) * max(work_s.values())) / self._num

    def best(self, tags: Sequence[str], fixed: Assignment) -> dict[str, str]:
        """The fastest assignment of `tags`, beside those that are fixed."""
        classes = list(self._workers)
        if len(classes) ** len(tags) <= MAX_TRIED:
            tried = itertools.product(classes, repeat=len(tags))
            return min(({**fixed, **dict(zip(tags, names, strict=True))} for names in tried), key=self.seconds)
        alone = {tag: self._fastest(tag) for tag in tags}
        chosen = {**fixed, **alone}
        while True:
            better = min(_neighbours(chosen, tags, classes), key=self.seconds)
            if self.seconds(better) >= self.seconds(chosen):
                return chosen
            chosen = better

    def _fastest(self, tag: str, but: str | None = None) -> str:
        """The class on which a task's turn is shortest, apart from one."""
        return min((name for name in self._workers if name != but), key=lambda name: self._turn[tag, name].seconds)

    def reason(self, tag: str, chosen: Assignment, before: str | None) -> str:
        """Why a task is on its class, in one line."""
        name = chosen[tag]
        said = [] if before is None or before in self._workers else [_lost(before)]
        if len(self._workers) > 1:
            said.append(self._against(tag, name, self._fastest(tag, but=name)))
        if before in self._workers:
            gain = self.seconds({**chosen, tag: before}) / self.seconds(chosen) - 1
            said.append(f"with it the whole mixture is {gain:.0%} faster than with {tag} on {before}")
        return "; ".join(said)

    def _against(self, tag: str, name: str, other: str) -> str:
        here, there = self._turn[tag, name], self._turn[tag, other]
        part = f"prefill {there.prefill_s / there.seconds:.0%} of its time there"
        if here.seconds <= there.seconds:
            return f"{there.seconds / here.seconds:.1f}x faster per turn than on {other} ({part})"
        slower = here.seconds / there.seconds
        return f"{slower:.1f}x slower per turn than on {other} ({part}), where other tasks gain more or it would queue"


def _lost(device_class: str) -> str:
    return f"{device_class} has no worker left"


def _neighbours(chosen: Assignment, tags: Sequence[str], classes: Sequence[str]) -> Iterator[dict[str, str]]:
    for tag in tags:
        yield from ({**chosen, tag: name} for name in classes)
    for one, other in itertools.combinations(tags, 2):
        yield {**chosen, one: chosen[other], other: chosen[one]}
