"""Which worker gets a request. PURE.

A trajectory lives on one worker, where its prefix is cached. It moves, to the least loaded one of the class, when its
worker is overloaded against that one in both: its load (tokens of its requests in flight), and what lives there beside
this trajectory (tokens of the last request of each, in flight or not). Loads alone deceive where many ask at one
moment, in lockstep or when a gate opens: who asks first would leave a worker that is no fuller than others, whose own
trajectories are about to ask. A worker that falls behind is left all the same: new trajectories avoid it at once, and
those on it move as those of the others end. Of equally loaded workers the least is the one where less lives.

A tag (task domain) prefers a device class (paper sections 1 and 3, hardware affinity) and falls back to another in two
cases only:

    none alive   the class has no worker: its compatible classes in order, then any class that has one
    none free    its least loaded worker runs as many requests as its engine has slots, so that the request would wait,
                 while the least loaded worker of a compatible class runs none: that one takes it, and the next such
                 request finds it busy

A tag without preference goes to the least loaded worker of all. A change of the affinity moves no trajectory. Classes
may be reserved for other work, such as prefilling for the others: one gets requests only while no other has a worker.

Invariants: a worker's load is the sum of the tokens of its requests in flight, and it is 0 when there are none; what
lives on it is the sum over the trajectories that were sent there last and not forgotten.
Cost: O(log workers + classes) per request, amortised. What it leaves out: the calls themselves (`llm_proxy.py`), and
who decides the affinity (`affinity.py`).
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence

from msgspec import Struct

from rollart.errors import ResourceError

DEFAULT = "default"


class _Worker(Struct, eq=False):
    name: str
    device_class: str
    order: int
    load: int = 0
    living: int = 0
    requests: int = 0
    present: bool = True

    @property
    def rank(self) -> tuple[int, int, int]:
        """The least loaded worker has the smallest."""
        return self.load, self.living, self.order


class _Home(Struct, eq=False):
    """Where a trajectory lives, and the tokens of its last request."""

    worker: _Worker
    tokens: int


class Fallback(Struct, frozen=True):
    """A kind of detour: `cause` is "none alive" or "none free"."""

    tag: str
    wanted: str
    served: str
    cause: str

    def __str__(self) -> str:
        return f"{self.tag}: {self.wanted} -> {self.served} ({self.cause})"


class _Class:
    """The workers of one device class; a heap of ranks whose outdated entries are skipped when they come up."""

    def __init__(self) -> None:
        self.workers: dict[int, _Worker] = {}
        self._heap: list[tuple[int, int, int]] = []

    def push(self, worker: _Worker) -> None:
        heapq.heappush(self._heap, worker.rank)
        if len(self._heap) > 64 + 8 * len(self.workers):
            self._heap = [each.rank for each in self.workers.values()]
            heapq.heapify(self._heap)

    def least(self) -> _Worker:
        while True:
            worker = self.workers.get(self._heap[0][-1])
            if worker is not None and worker.rank == self._heap[0]:
                return worker
            heapq.heappop(self._heap)


class Router:
    """Chooses among workers of the preferred class.

    affinity: tag -> device class; the entry "default" serves other tags.
    fallback: device class -> compatible classes, in order.
    slots: requests that an engine runs at once; 0 when that is not known, and then no class is ever "not free".
    reserved: classes that serve only while no other class has a worker; no tag prefers one.
    A worker is overloaded when both its sums of tokens exceed `overload` times those of the least plus `slack_tokens`.
    `fallbacks` counts the trajectories that were sent to another class than their tag's.
    """

    def __init__(
        self,
        affinity: Mapping[str, str] | None = None,
        fallback: Mapping[str, Sequence[str]] | None = None,
        overload: float = 1.5,
        slack_tokens: int = 2048,
        slots: int = 0,
        reserved: Collection[str] = (),
    ) -> None:
        self.fallbacks: Counter[Fallback] = Counter()
        self._affinity = dict(affinity or {})
        self._fallback = dict(fallback or {})
        self._overload = overload
        self._slack_tokens = slack_tokens
        self._slots = slots
        self._reserved = frozenset(reserved)
        self._workers: dict[str, _Worker] = {}
        self._classes: dict[str, _Class] = {}
        self._homes: dict[str, _Home] = {}
        self._num_added = 0

    def add(self, name: str, device_class: str = DEFAULT) -> None:
        """A worker is there. Raises ResourceError when its name is taken."""
        if name in self._workers:
            raise ResourceError(f"worker {name!r} exists already; worker names must differ")
        worker = _Worker(name, device_class, self._num_added)
        self._num_added += 1
        self._workers[name] = worker
        mates = self._classes.setdefault(device_class, _Class())
        mates.workers[worker.order] = worker
        mates.push(worker)

    def remove(self, name: str) -> None:
        """A worker is gone; its trajectories are sent elsewhere from their next request on."""
        worker = self._workers.pop(name)
        worker.present = False
        del self._classes[worker.device_class].workers[worker.order]

    def load(self, name: str) -> int:
        """Outstanding tokens of a worker."""
        return self._workers[name].load

    def class_of(self, name: str) -> str:
        """The device class of a worker."""
        return self._workers[name].device_class

    def is_reserved(self, device_class: str) -> bool:
        """Whether a class serves only while no other has a worker."""
        return device_class in self._reserved

    @property
    def affinity(self) -> dict[str, str]:
        """Tag -> device class, as it is now."""
        return dict(self._affinity)

    def set_affinity(self, affinity: Mapping[str, str]) -> None:
        """From now on; trajectories stay where they are."""
        self._affinity = dict(affinity)

    def knows(self, trajectory_id: str) -> bool:
        """Whether a trajectory is on a worker that is there."""
        home = self._homes.get(trajectory_id)
        return home is not None and home.worker.present

    def choose(self, trajectory_id: str, tag: str, num_tokens: int, wish: str | None = None) -> str:
        """The worker for a request of `num_tokens`, now outstanding. Raises ResourceError when there is no worker.

        wish: the class for this trajectory, in place of its tag's, if it has a worker and the trajectory has none.
        """
        home = self._homes.get(trajectory_id)
        if home is None or not self._may_stay(home):
            worker = self._place(tag, wish)
            self._leave(home)
            home = self._homes[trajectory_id] = _Home(worker, 0)
        home.worker.living += num_tokens - home.tokens
        home.tokens = num_tokens
        self._change(home.worker, num_tokens, 1)
        return home.worker.name

    def finished(self, name: str, num_tokens: int) -> None:
        """A request has ended. Harmless for a worker that was removed."""
        if worker := self._workers.get(name):
            self._change(worker, -num_tokens, -1)

    def forget(self, trajectory_id: str) -> str | None:
        """A trajectory has ended; the worker that it was on, where that still is."""
        home = self._homes.pop(trajectory_id, None)
        self._leave(home)
        return home.worker.name if home is not None and home.worker.present else None

    def check(self, outstanding: Iterable[tuple[str, int]]) -> None:
        """Assert the invariants, given (worker, tokens) of every request in flight."""
        loads, living = dict.fromkeys(self._workers, 0), dict.fromkeys(self._workers, 0)
        for name, num_tokens in outstanding:
            if name in loads:
                loads[name] += num_tokens
        for home in self._homes.values():
            if home.worker.present:
                living[home.worker.name] += home.tokens
        assert loads == {name: worker.load for name, worker in self._workers.items()}
        assert living == {name: worker.living for name, worker in self._workers.items()}
        assert all(worker.requests >= 0 for worker in self._workers.values())
        for name, mates in self._classes.items():
            present = [worker for worker in self._workers.values() if worker.device_class == name]
            assert present == list(mates.workers.values())
            assert not present or mates.least().rank == min(worker.rank for worker in present)

    def _place(self, tag: str, wish: str | None) -> _Worker:
        """The worker for a trajectory that has none."""
        if wish is not None and (worker := self._least(wish)):
            return worker
        wanted = self._affinity.get(tag) or self._affinity.get(DEFAULT)
        if wanted is None:
            return self._least_of_all(tag)
        worker = self._least(wanted)
        compatible = [each for name in self._fallback.get(wanted, ()) if (each := self._least(name))]
        if worker is None:
            stand_in = compatible[0] if compatible else self._least_of_all(tag)
            return self._detour(tag, wanted, stand_in, "none alive")
        if self._slots and worker.requests >= self._slots:
            idle = next((each for each in compatible if not each.requests), None)
            if idle is not None:
                return self._detour(tag, wanted, idle, "none free")
        return worker

    def _detour(self, tag: str, wanted: str, worker: _Worker, cause: str) -> _Worker:
        self.fallbacks[Fallback(tag, wanted, worker.device_class, cause)] += 1
        return worker

    def _least(self, device_class: str) -> _Worker | None:
        """Of a class that is not reserved."""
        mates = self._classes.get(device_class)
        return mates.least() if mates is not None and mates.workers and device_class not in self._reserved else None

    def _serving(self) -> list[_Worker]:
        """The least loaded worker of each class that is not reserved."""
        return [worker for name in self._classes if (worker := self._least(name))]

    def _least_of_all(self, tag: str) -> _Worker:
        there = self._serving() or [mates.least() for mates in self._classes.values() if mates.workers]
        if not there:
            raise ResourceError(f"no inference worker for tag {tag!r}: none is left")
        return min(there, key=lambda worker: worker.rank)

    def _may_stay(self, home: _Home) -> bool:
        worker = home.worker
        if not worker.present or (worker.device_class in self._reserved and self._serving()):
            return False
        least = self._classes[worker.device_class].least()
        beside = worker.living - home.tokens
        return not (self._exceeds(worker.load, least.load) and self._exceeds(beside, least.living))

    def _exceeds(self, tokens: int, least: int) -> bool:
        return tokens > self._overload * least + self._slack_tokens

    def _leave(self, home: _Home | None) -> None:
        """A trajectory lives there no more."""
        if home is not None and home.worker.present:
            home.worker.living -= home.tokens
            self._classes[home.worker.device_class].push(home.worker)

    def _change(self, worker: _Worker, num_tokens: int, num_requests: int) -> None:
        worker.load += num_tokens
        worker.requests += num_requests
        self._classes[worker.device_class].push(worker)
