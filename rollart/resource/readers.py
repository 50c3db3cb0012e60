"""Which prefill worker reads a prompt. PURE.

The one that will have read it first, counted in tokens: those that wait there already, and those of the prompt that it
does not keep from the trajectory's earlier turns. So a trajectory comes back to the worker that has its prefix, unless
more waits there than another would have to read anew. Where that is equal, the one that came first.

Invariant: what waits at a worker is the sum over the requests there of the tokens that it was to read for them.
Cost: O(workers). What this file leaves out: the calls themselves (`control/prefill.py`), who decodes (`routing.py`).
"""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import Struct

from rollart.errors import ResourceError


class Prefix(Struct, frozen=True):
    """A worker keeps the KV of a trajectory's first `num_tokens` tokens, under a version of the weights."""

    worker: str
    version: int
    num_tokens: int

    def serves(self, worker: str, version: int) -> int:
        """How many tokens a worker need not compute."""
        return self.num_tokens if (self.worker, self.version) == (worker, version) else 0


NOTHING = Prefix("", 0, 0)


class Readers:
    """The prefill workers, and what they have to read."""

    def __init__(self) -> None:
        self._waiting: dict[str, int] = {}
        self._kept: dict[str, Prefix] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, name: str) -> None:
        """A worker is there. Raises ResourceError when its name is taken."""
        if name in self._waiting:
            raise ResourceError(f"worker {name!r} exists already; worker names must differ")
        self._waiting[name] = 0

    def remove(self, name: str) -> None:
        """A worker is gone, with what it kept."""
        del self._waiting[name]

    def choose(self, trajectory_id: str, num_tokens: int, version: int) -> tuple[str, int]:
        """The worker for a prompt of `num_tokens`, and how many of them it is to read, which now wait there.

        Raises ResourceError when there is no worker.
        """
        if not self._waiting:
            raise ResourceError("no prefill worker is left")
        kept = self._kept.get(trajectory_id, NOTHING)
        unread = {name: max(1, num_tokens - kept.serves(name, version)) for name in self._waiting}
        name = min(self._waiting, key=lambda each: self._waiting[each] + unread[each])
        self._waiting[name] += unread[name]
        if name != kept.worker:
            self._kept[trajectory_id] = Prefix(name, version, 0)
        return name, unread[name]

    def finished(self, name: str, unread: int) -> None:
        """A worker has read what it was chosen for, or need not any more. Harmless when it was removed."""
        if name in self._waiting:
            self._waiting[name] -= unread

    def keeps(self, trajectory_id: str, prefix: Prefix) -> None:
        """A worker has read so far for a trajectory."""
        self._kept[trajectory_id] = prefix

    def forget(self, trajectory_id: str) -> str | None:
        """A trajectory has ended; the worker that may keep something of it, where that still is."""
        name = self._kept.pop(trajectory_id, NOTHING).worker
        return name if name in self._waiting else None

    def check(self, outstanding: Iterable[tuple[str, int]]) -> None:
        """Assert the invariant, given (worker, tokens to read) of every request that is being read."""
        waiting = dict.fromkeys(self._waiting, 0)
        for name, unread in outstanding:
            if name in waiting:
                waiting[name] += unread
        assert waiting == self._waiting
