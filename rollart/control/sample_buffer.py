"""Complete groups that wait for the trainer: `ReadyGroups` decides (PURE), `SampleBuffer` waits (asyncio).

Invariants: no group comes out twice; what comes out obeys the staleness bound at the version it is taken; any ready
group can be taken, so none waits behind another. Bounded by the slots of `group_book.py`.
What it leaves out: groups that still run.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from msgspec import Struct

from rollart.control.staleness import Staleness
from rollart.types import Group


class Batch(Struct, frozen=True):
    """What `get_batch` gives: the groups, and the version that the workers held at that moment."""

    groups: list[Group]
    version: int


def start_version(group: Group) -> int:
    """The oldest start among the members: the one that decides the group's age."""
    return min(t.start_version for t in group.trajectories if t.start_version is not None)


class ReadyGroups:
    """The pure state."""

    def __init__(self, staleness: Staleness) -> None:
        self._staleness = staleness
        self._groups: dict[str, Group] = {}

    def __len__(self) -> int:
        return len(self._groups)

    def add(self, group: Group) -> None:
        """A group is complete."""
        assert group.spec.group_id not in self._groups, f"group {group.spec.group_id} is ready twice"
        self._groups[group.spec.group_id] = group

    def discard(self, group_id: str) -> None:
        """Forget a group; harmless when it is not here."""
        self._groups.pop(group_id, None)

    def too_old(self, group: Group, version: int) -> bool:
        """Whether the group could not be taken at `version`, whatever else is taken."""
        return version - start_version(group) > self._staleness.oldest

    def evict(self, version: int) -> list[Group]:
        """Take out what is too old at `version`."""
        ages = ((group.spec.group_id, version - start_version(group)) for group in self._oldest_first())
        return [self._groups.pop(group_id) for group_id in self._staleness.stale(ages)]

    def take(self, num_groups: int) -> list[Group] | None:
        """The `num_groups` oldest, or None while there are fewer. Evict first."""
        if len(self._groups) < num_groups:
            return None
        return [self._groups.pop(group.spec.group_id) for group in self._oldest_first()[:num_groups]]

    def _oldest_first(self) -> list[Group]:
        return sorted(self._groups.values(), key=lambda group: (start_version(group), group.spec.index))


class SampleBuffer:
    """Lets one trainer wait for ready groups. `version` tells the workers' version, `evicted` hears of stale groups."""

    def __init__(
        self, staleness: Staleness, version: Callable[[], int], evicted: Callable[[list[Group]], None]
    ) -> None:
        self._ready = ReadyGroups(staleness)
        self._version = version
        self._evicted = evicted
        self._changed = asyncio.Event()
        self._wanted = 0

    def __len__(self) -> int:
        return len(self._ready)

    def put(self, groups: Iterable[Group]) -> None:
        """Groups are complete: wake the trainer when they fill its batch, or one is stale and holds a slot in vain."""
        stale = False
        for group in groups:
            self._ready.add(group)
            stale = stale or self._ready.too_old(group, self._version())
        if stale or len(self._ready) >= self._wanted:
            self._changed.set()

    def discard(self, group_id: str) -> None:
        """A group was dropped."""
        self._ready.discard(group_id)

    async def get_batch(self, num_groups: int) -> Batch:
        """Step 1 of the protocol (paper section 5): evict the stale, then wait for `num_groups`, oldest first."""
        self._wanted = num_groups
        while True:
            version = self._version()
            if evicted := self._ready.evict(version):
                self._evicted(evicted)
            if (groups := self._ready.take(num_groups)) is not None:
                return Batch(groups, version)
            self._changed.clear()
            await self._changed.wait()
