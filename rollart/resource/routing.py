"""Which worker gets a request. PURE.

A trajectory stays on its worker, where its prefix is cached, unless that worker is overloaded relative to the least
loaded one of its class; else the least loaded takes it (load = outstanding tokens). A tag (task domain) prefers a
device class, and falls back to the next class that has a worker (paper sections 1 and 3, hardware affinity).

Invariant: a worker's load is the sum of the tokens of its requests in flight, and it is 0 when there are none.
Cost: O(log workers) per request, amortised. What it leaves out: the calls themselves (`llm_proxy.py`).
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence

from msgspec import Struct

from rollart.errors import ResourceError

DEFAULT = "default"


class _Worker(Struct, eq=False):
    name: str
    device_class: str
    order: int
    load: int = 0
    present: bool = True


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
    fallback: device class -> classes to try, in order, when it has no worker; then any class that has one.
    A sticky worker is overloaded when its load exceeds `overload` times the least load plus `slack_tokens`.
    """

    def __init__(
        self,
        affinity: Mapping[str, str] | None = None,
        fallback: Mapping[str, Sequence[str]] | None = None,
        overload: float = 1.5,
        slack_tokens: int = 2048,
    ) -> None:
        self._affinity = dict(affinity or {})
        self._fallback = dict(fallback or {})
        self._overload = overload
        self._slack_tokens = slack_tokens
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

    def choose(self, trajectory_id: str, tag: str, num_tokens: int) -> str:
        """The worker for a request of `num_tokens`, now outstanding. Raises ResourceError when there is no worker."""
        home = self._class_for(tag)
        worker = home.least()
        sticky = self._sticky.get(trajectory_id)
        if sticky is not None and sticky.present and not self._overloaded(sticky, worker):
            worker = sticky
        self._sticky[trajectory_id] = worker
        self._change(worker, num_tokens)
        return worker.name

    def finished(self, name: str, num_tokens: int) -> None:
        """A request has ended. Harmless for a worker that was removed."""
        if worker := self._workers.get(name):
            self._change(worker, -num_tokens)

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
        for name, home in self._classes.items():
            present = [worker for worker in self._workers.values() if worker.device_class == name]
            assert present == list(home.workers.values())
            assert not present or home.least().load == min(worker.load for worker in present)

    def _class_for(self, tag: str) -> _Class:
        preferred = self._affinity.get(tag) or self._affinity.get(DEFAULT, DEFAULT)
        for name in (preferred, *self._fallback.get(preferred, ()), *self._classes):
            home = self._classes.get(name)
            if home is not None and home.workers:
                return home
        raise ResourceError(f"no inference worker for tag {tag!r}: none is left")

    def _overloaded(self, sticky: _Worker, least: _Worker) -> bool:
        return sticky.load > self._overload * least.load + self._slack_tokens

    def _change(self, worker: _Worker, num_tokens: int) -> None:
        worker.load += num_tokens
        self._classes[worker.device_class].push(worker)
