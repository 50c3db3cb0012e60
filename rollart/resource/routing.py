"""Which worker gets a request. PURE.

A trajectory stays on its worker, where its prefix is cached, unless that worker is overloaded relative to the least
loaded one of its class; else the least loaded takes it (load = outstanding tokens). A tag (task domain) prefers a
device class (paper sections 1 and 3, hardware affinity) and falls back to another in two cases only:

    none alive   the class has no worker: its compatible classes in order, then any class that has one
    none free    its least loaded worker runs as many requests as its engine has slots, so that the request would wait,
                 while the least loaded worker of a compatible class runs none: that one takes it, and the next such
                 request finds it busy

A tag without preference goes to the least loaded worker of all. A change of the affinity moves no trajectory.

Invariant: a worker's load is the sum of the tokens of its requests in flight, and it is 0 when there are none.
Cost: O(log workers + classes) per request, amortised. What it leaves out: the calls themselves (`llm_proxy.py`), and
who decides the affinity (`affinity.py`).
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from msgspec import Struct

from rollart.errors import ResourceError

DEFAULT = "default"


class _Worker(Struct, eq=False):
    name: str
    device_class: str
    order: int
    load: int = 0
    requests: int = 0
    present: bool = True


class Fallback(Struct, frozen=True):
    """A kind of detour: `cause` is "none alive" or "none free"."""

    tag: str
    wanted: str
    served: str
    cause: str

    def __str__(self) -> str:
        return f"{self.tag}: {self.wanted} -> {self.served} ({self.cause})"


class _Class:
    """The workers of one device class; a heap of (load, order) whose outdated entries are skipped when they come up."""

    def __init__(self) -> None:
        self.workers: dict[int, _Worker] = {}
        self._heap: list[tuple[int, int]] = []

    def push(self, worker: _Worker) -> None:
        heapq.heappush(self._heap, (worker.load, worker.order))
        if len(self._heap) > 64 + 8 * len(self.workers):
            self._heap = [(each.load, each.order) for each in self.workers.values()]
            heapq.heapify(self._heap)

    def least(self) -> _Worker:
        while True:
            load, order = self._heap[0]
            worker = self.workers.get(order)
            if worker is not None and load == worker.load:
                return worker
            heapq.heappop(self._heap)


class Router:
    """Chooses among workers of the preferred class.

    affinity: tag -> device class; the entry "default" serves other tags.
    fallback: device class -> compatible classes, in order.
    slots: requests that an engine runs at once; 0 when that is not known, and then no class is ever "not free".
    A sticky worker is overloaded when its load exceeds `overload` times the least load plus `slack_tokens`.
    `fallbacks` counts the trajectories that were sent to another class than their tag's.
    """

    def __init__(
        self,
        affinity: Mapping[str, str] | None = None,
        fallback: Mapping[str, Sequence[str]] | None = None,
        overload: float = 1.5,
        slack_tokens: int = 2048,
        slots: int = 0,
    ) -> None:
        self.fallbacks: Counter[Fallback] = Counter()
        self._affinity = dict(affinity or {})
        self._fallback = dict(fallback or {})
        self._overload = overload
        self._slack_tokens = slack_tokens
        self._slots = slots
        self._workers: dict[str, _Worker] = {}
        self._classes: dict[str, _Class] = {}
        self._sticky: dict[str, _Worker] = {}
        self._num_added = 0

    def add(self, name: str, device_class: str = DEFAULT) -> None:
        """A worker is there. Raises ResourceError when its name is taken."""
        if name in self._workers:
            raise ResourceError(f"worker {name!r} exists already; worker names must differ")
        worker = _Worker(name, device_class, self._num_added)
        self._num_added += 1
        self._workers[name] = worker
        home = self._classes.setdefault(device_class, _Class())
        home.workers[worker.order] = worker
        home.push(worker)

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

    @property
    def affinity(self) -> dict[str, str]:
        """Tag -> device class, as it is now."""
        return dict(self._affinity)

    def set_affinity(self, affinity: Mapping[str, str]) -> None:
        """From now on; trajectories stay where they are."""
        self._affinity = dict(affinity)

    def knows(self, trajectory_id: str) -> bool:
        """Whether a trajectory is on a worker that is there."""
        worker = self._sticky.get(trajectory_id)
        return worker is not None and worker.present

    def choose(self, trajectory_id: str, tag: str, num_tokens: int, wish: str | None = None) -> str:
        """The worker for a request of `num_tokens`, now outstanding. Raises ResourceError when there is no worker.

        wish: the class for this trajectory, in place of its tag's, if it has a worker and the trajectory has none.
        """
        worker = self._sticky.get(trajectory_id)
        if worker is None or not worker.present or self._overloaded(worker):
            worker = self._sticky[trajectory_id] = self._place(tag, wish)
        self._change(worker, num_tokens, 1)
        return worker.name

    def finished(self, name: str, num_tokens: int) -> None:
        """A request has ended. Harmless for a worker that was removed."""
        if worker := self._workers.get(name):
            self._change(worker, -num_tokens, -1)

    def forget(self, trajectory_id: str) -> str | None:
        """A trajectory has ended; the worker that it was on, where that still is."""
        worker = self._sticky.pop(trajectory_id, None)
        return worker.name if worker is not None and worker.present else None

    def check(self, outstanding: Iterable[tuple[str, int]]) -> None:
        """Assert the invariant, given (worker, tokens) of every request in flight."""
        loads = dict.fromkeys(self._workers, 0)
        for name, num_tokens in outstanding:
            if name in loads:
                loads[name] += num_tokens
        assert loads == {name: worker.load for name, worker in self._workers.items()}
        assert all(worker.requests >= 0 for worker in self._workers.values())
        for name, home in self._classes.items():
            present = [worker for worker in self._workers.values() if worker.device_class == name]
            assert present == list(home.workers.values())
            assert not present or home.least().load == min(worker.load for worker in present)

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
        home = self._classes.get(device_class)
        return home.least() if home is not None and home.workers else None

    def _least_of_all(self, tag: str) -> _Worker:
        there = [worker for name in self._classes if (worker := self._least(name))]
        if not there:
            raise ResourceError(f"no inference worker for tag {tag!r}: none is left")
        return min(there, key=lambda worker: (worker.load, worker.order))

    def _overloaded(self, sticky: _Worker) -> bool:
        least = self._classes[sticky.device_class].least()
        return sticky.load > self._overload * least.load + self._slack_tokens

    def _change(self, worker: _Worker, num_tokens: int, num_requests: int) -> None:
        worker.load += num_tokens
        worker.requests += num_requests
        self._classes[worker.device_class].push(worker)
