"""Pools of devices and who holds them: bind, fall back, release, fail. PURE: no clock, no store, no process.

A pool is a set of devices of one class on some nodes. A device takes `share` bindings at once (1 for accelerators; CPU
cores are shared by time, so many). `bind` takes the class that is asked for, else, so that a run starts instead of
stalling, one that its pools declare compatible (paper section 2).

Invariants (`check`): no device carries more bindings than its share, none is lost (free + held + failed = all), and
every binding lies on one node and one pool. What this file leaves out: which process works on a binding, leases of runs
that died (`manager.py`), and where the state is kept (`store.py`).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from heapq import heapify, heappop
from typing import Any

import msgspec
from msgspec import Struct, field
from msgspec.structs import replace

from rollart.checks import nearest
from rollart.errors import ConfigError, ResourceError
from rollart.types import Binding, PoolSpec

NAMED = 5
"""Runs that hold something, that an error line names before it counts the rest."""


class PoolRow(Struct, frozen=True):
    """One node of one pool, as a table shows it. `holders`: binding ids."""

    pool: str
    device_class: str
    node: str
    total: int
    free: int
    failed: int
    cost: float
    holders: tuple[str, ...]


class PoolState(Struct):
    """All that must survive: plain data. `failed` maps pool/node to indices of devices."""

    pools: dict[str, PoolSpec] = field(default_factory=dict)
    bindings: dict[str, Binding] = field(default_factory=dict)
    failed: dict[str, set[int]] = field(default_factory=dict)


class Pools:
    """The live view of all pools. Every method either does the whole of what it says or raises and changes nothing."""

    def __init__(self, specs: Iterable[PoolSpec] = (), state: PoolState | None = None) -> None:
        self._state = state or PoolState()
        self._load: dict[str, Counter[int]] = defaultdict(Counter)
        self._held: Counter[tuple[str, str]] = Counter()
        """Bindings of all devices of a node together, by pool and node."""
        for binding in self._state.bindings.values():
            self._count(binding, 1)
        self.declare(specs)

    # ------------------------------------------------------------------------------------------------ declarations
    def declare(self, specs: Iterable[PoolSpec]) -> None:
        """Add pools, and nodes that have joined one. Raises ConfigError when one that is in use differs otherwise.

        A node that is there stays, also when a later run no longer sees it: what is known of its loss is kept. A pool
        of which nobody holds anything is what the last run to declare it says.
        """
        new = {spec.name: spec for spec in specs}
        for name, spec in new.items():
            known = self._state.pools.get(name)
            if known is None:
                continue
            new[name] = replace(spec, nodes={**known.nodes, **spec.nodes})
            if replace(known, nodes=new[name].nodes) == new[name] and known.nodes.items() <= new[name].nodes.items():
                continue
            if holders := [each for each in self._state.bindings.values() if each.pool == name]:
                raise ConfigError(
                    f"pools.{spec.name}: this store has a pool of that name that differs ({_differs(known, spec)}), "
                    f"and {holders[0].run} holds some of it; take its values, another name, or another resources.name"
                )
            new[name] = spec
            for node in known.nodes:
                self._failed(name, node).intersection_update(spec.nodes.get(node, ()))
        for spec in new.values():
            self._state.pools[spec.name] = spec

    def add_node(self, pool: str, node: str, devices: Collection[int]) -> None:
        """A node has joined (or come back): its devices are free and whole."""
        spec = self._state.pools[pool]
        self._state.pools[pool] = replace(spec, nodes={**spec.nodes, node: tuple(sorted(devices))})
        self._state.failed.pop(_place(pool, node), None)

    @property
    def classes(self) -> tuple[str, ...]:
        """Device classes that some pool has, in the order of the pools."""
        return tuple(dict.fromkeys(spec.device_class for spec in self._state.pools.values()))

    @property
    def specs(self) -> dict[str, PoolSpec]:
        """The pools by name."""
        return dict(self._state.pools)

    def compatible(self, device_class: str) -> tuple[str, ...]:
        """The class itself, then what its pools declare compatible, in order."""
        pools = [spec for spec in self._state.pools.values() if spec.device_class == device_class]
        return tuple(dict.fromkeys((device_class, *(name for spec in pools for name in spec.compatible))))

    # ---------------------------------------------------------------------------------------------------- bindings
    def bind(
        self, binding_id: str, role: str, device_class: str, num_devices: int = 1, avoid: Collection[str] = ()
    ) -> Binding:
        """Take `num_devices` devices of one node: of the class, else of a compatible one; `avoid` names nodes.

        Raises ConfigError for a class that no pool has, ResourceError when nothing that fits is free.
        """
        if binding_id in self._state.bindings:
            raise ResourceError(f"{binding_id} is bound already; release it first")
        if device_class not in self.classes:
            raise ConfigError(f"device class {device_class!r}: no pool has it{nearest(device_class, self.classes)}")
        for name in self.compatible(device_class):
            place = self._roomiest(name, num_devices, avoid)
            if place is not None:
                pool, node, devices = place
                spec = self._state.pools[pool]
                binding = Binding(binding_id, role, pool, name, node, devices, device_class, spec.device, spec.share)
                self._hold(binding)
                return binding
        raise ResourceError(self._why_not(device_class, num_devices, avoid))

    def adopt(self, binding: Binding) -> None:
        """Take a binding back that was made before, as after the loss of a store. Raises ResourceError."""
        spec = self._state.pools.get(binding.pool)
        if spec is None or not set(binding.devices) <= set(spec.nodes.get(binding.node, ())):
            raise ResourceError(f"{binding.binding_id}: the store has no {binding}")
        loads = self._load[_place(binding.pool, binding.node)]
        failed = self._failed(binding.pool, binding.node)
        taken = [each for each in binding.devices if loads[each] >= spec.share or each in failed]
        if binding.binding_id in self._state.bindings or taken:
            raise ResourceError(f"{binding.binding_id}: its devices {list(binding.devices)} are held by another by now")
        self._hold(binding)

    def in_the_way(self, binding: Binding) -> list[str]:
        """Runs that hold so much of its devices that nothing is left for it."""
        loads = self._load[_place(binding.pool, binding.node)]
        full = {each for each in binding.devices if loads[each] >= binding.share}
        others = (each for each in self._state.bindings.values() if each.pool == binding.pool)
        return sorted({each.run for each in others if each.node == binding.node and full & set(each.devices)})

    def release(self, binding_id: str) -> None:
        """Give devices back. Harmless when it is not bound."""
        binding = self._state.bindings.pop(binding_id, None)
        if binding is not None:
            self._count(binding, -1)

    def release_run(self, run: str) -> list[Binding]:
        """Give back all that one run holds; what it held."""
        held = self.held_by(run)
        for binding in held:
            self.release(binding.binding_id)
        return held

    def held_by(self, run: str) -> list[Binding]:
        """Bindings of one run."""
        return [each for each in self._state.bindings.values() if each.run == run]

    # ------------------------------------------------------------------------------------------------------ faults
    def fail(self, pool: str, node: str, devices: Collection[int] | None = None) -> list[Binding]:
        """Devices (default: all of the node) are broken; the bindings that stood on them, which are gone."""
        there = self._state.pools[pool].nodes[node]
        broken = set(there if devices is None else devices) & set(there)
        self._state.failed.setdefault(_place(pool, node), set()).update(broken)
        lost = [
            each
            for each in self._state.bindings.values()
            if each.pool == pool and each.node == node and broken & set(each.devices)
        ]
        for binding in lost:
            self.release(binding.binding_id)
        return lost

    def fail_node(self, node: str) -> list[Binding]:
        """As `fail`, for every pool that has devices on the node."""
        pools = [name for name, spec in self._state.pools.items() if node in spec.nodes]
        return [binding for pool in pools for binding in self.fail(pool, node)]

    def repair(self, pool: str, node: str) -> None:
        """The devices of a node work again."""
        self._state.failed.pop(_place(pool, node), None)

    def returned(self, specs: Iterable[PoolSpec]) -> None:
        """Nodes that are there now: one that was lost whole is back. Devices that broke one by one stay broken."""
        for spec in specs:
            for node, devices in spec.nodes.items():
                if set(devices) <= self._failed(spec.name, node):
                    self.repair(spec.name, node)

    # -------------------------------------------------------------------------------------------------------- view
    def rows(self) -> list[PoolRow]:
        """One row per pool and node."""
        holders: dict[str, list[str]] = defaultdict(list)
        for binding in self._state.bindings.values():
            holders[_place(binding.pool, binding.node)].append(binding.binding_id)
        return [
            PoolRow(
                pool=spec.name,
                device_class=spec.device_class,
                node=node,
                total=len(devices),
                free=len(self._free(spec, node)),
                failed=len(self._failed(spec.name, node)),
                cost=spec.cost,
                holders=tuple(holders[_place(spec.name, node)]),
            )
            for spec in self._state.pools.values()
            for node, devices in spec.nodes.items()
        ]

    def binding(self, binding_id: str) -> Binding | None:
        """What is bound under an id."""
        return self._state.bindings.get(binding_id)

    def runs(self) -> set[str]:
        """Runs that hold something."""
        return {binding.run for binding in self._state.bindings.values()}

    def state(self) -> Any:
        """Plain data for a store."""
        return msgspec.to_builtins(self._state)

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> Pools:
        """From what `state` gave. Raises ResourceError when it is not that."""
        try:
            return cls((), msgspec.convert(state, PoolState, strict=False))
        except msgspec.ValidationError as error:
            raise ResourceError(f"the stored resource view is damaged: {error}") from error

    def check(self) -> None:
        """Assert the invariants."""
        for spec in self._state.pools.values():
            for node, devices in spec.nodes.items():
                assert len(set(devices)) == len(devices)
                here = [each for each in self._state.bindings.values() if (each.pool, each.node) == (spec.name, node)]
                loads = Counter(device for each in here for device in each.devices)
                assert loads == +self._load[_place(spec.name, node)]
                assert loads.total() == self._held[spec.name, node]
                assert all(load <= spec.share for load in loads.values())
                assert set(loads) <= set(devices)
                assert self._failed(spec.name, node) <= set(devices)
        for key, binding in self._state.bindings.items():
            assert key == binding.binding_id
            assert binding.devices
            assert set(binding.devices) <= set(self._state.pools[binding.pool].nodes[binding.node])
            assert not set(binding.devices) & self._failed(binding.pool, binding.node)
            assert binding.device_class in self.compatible(binding.asked_class)

    # ------------------------------------------------------------------------------------------------------ inside
    def _failed(self, pool: str, node: str) -> set[int]:
        return self._state.failed.get(_place(pool, node), set())

    def _free(self, spec: PoolSpec, node: str) -> list[int]:
        loads, failed = self._load[_place(spec.name, node)], self._failed(spec.name, node)
        return [each for each in spec.nodes[node] if loads[each] < spec.share and each not in failed]

    def _hold(self, binding: Binding) -> None:
        self._state.bindings[binding.binding_id] = binding
        self._count(binding, 1)

    def _count(self, binding: Binding, times: int) -> None:
        loads = self._load[_place(binding.pool, binding.node)]
        for device in binding.devices:
            loads[device] += times
        self._held[binding.pool, binding.node] += times * len(binding.devices)

    def _roomiest(self, name: str, wanted: int, avoid: Collection[str]) -> tuple[str, str, tuple[int, ...]] | None:
        """The node of the class with most room, and its least loaded devices; the cheapest pool first."""
        pools = self._state.pools
        places = [
            (spec.cost, self._held[spec.name, node] / (spec.share * len(devices)), order, spec.name, node)
            for spec in pools.values()
            if spec.device_class == name
            for order, (node, devices) in enumerate(spec.nodes.items())
            if devices and node not in avoid
        ]
        heapify(places)
        while places:
            *_, pool, node = heappop(places)
            free = self._free(pools[pool], node)
            if len(free) >= wanted:
                loads = self._load[_place(pool, node)]
                return pool, node, tuple(sorted(sorted(free, key=lambda each: (loads[each], each))[:wanted]))
        return None

    def _why_not(self, device_class: str, wanted: int, avoid: Collection[str]) -> str:
        what = f"{wanted} device{'s' if wanted != 1 else ''}"
        rows = [row for row in self.rows() if row.device_class == device_class]
        there = _there(rows)
        workers = Counter(run for row in rows for run in _runs_of(row.holders))
        held = [f"{run} ({number} worker{'s' if number != 1 else ''})" for run, number in sorted(workers.items())]
        holders = ", ".join(held[:NAMED]) + (f" and {len(held) - NAMED} more" if len(held) > NAMED else "")
        others = self.compatible(device_class)[1:]
        fallback = (
            f"nor of the compatible {', '.join(others)}"
            if others
            else "and its pool names no class in `compatible` to fall back to"
        )
        return (
            f"no node has {what} of class {device_class!r} free ({there or 'no node'})"
            + (f", leaving out {', '.join(sorted(avoid))}" if avoid else "")
            + f", {fallback}"
            + (f"; held by {holders}" if holders else "")
        )


def _there(rows: Sequence[PoolRow]) -> str:
    """What nodes have, those that have the same together."""
    alike: defaultdict[tuple[int, int, int], list[str]] = defaultdict(list)
    for row in rows:
        alike[row.total, row.free, row.failed].append(row.node)
    said = []
    for (total, free, failed), nodes in alike.items():
        who = nodes[0] if len(nodes) == 1 else f"each of {len(nodes)} nodes, {nodes[0]} to {nodes[-1]}"
        said.append(f"{who}: {total} in all, {free} free, {failed} failed")
    return "; ".join(said)


def _runs_of(holders: Iterable[str]) -> Iterator[str]:
    return (holder.rpartition("/")[0] for holder in holders)


def _place(pool: str, node: str) -> str:
    return f"{pool}/{node}"


def _differs(known: PoolSpec, spec: PoolSpec) -> str:
    names = [name for name in spec.__struct_fields__ if getattr(known, name) != getattr(spec, name)]
    return ", ".join(
        f"{name} {_shown(getattr(known, name))} there, {_shown(getattr(spec, name))} here" for name in names
    )


def _shown(value: object) -> str:
    """As a config has it: nodes with the ids of their devices, classes by name."""
    if isinstance(value, dict):
        return "; ".join(f"{node} {','.join(map(str, devices))}" for node, devices in value.items()) or "none"
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value)) or "none"
    return str(value) if value != "" else "none"
