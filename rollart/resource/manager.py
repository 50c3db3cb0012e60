"""ResourceManager: the live view of all pools in a metadata store, and what this run holds of them (paper section 2).

A run holds a lease. While its heart beats, its bindings count; when the lease ends (kill -9, lost machine) whoever
binds next takes its devices back. A run that was only frozen beyond its lease (SIGSTOP, a machine asleep) gets back
what nobody has taken; of the rest it is told by `on_taken`. The store may go away for a while: what is bound stays
bound, binding says so and fails, and when the store comes back empty the run writes its pools and bindings again.

Invariants: every change is one compare-and-swap of the whole view, made by the pure `Pools`; a device is never held by
two runs whose leases are held. What this file leaves out: processes on the bindings (`data/cluster.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TypeVar

import msgspec

from rollart.checks import nearest
from rollart.errors import ConfigError, ResourceError
from rollart.resource.placement import Wanted
from rollart.resource.pool import PoolRow, Pools
from rollart.resource.store import MetadataStore
from rollart.types import Binding, PoolSpec

log = logging.getLogger(__name__)

T = TypeVar("T")

BEATS_PER_LEASE = 3
ATTEMPTS = 200
"""Lost races in a row after which the store must be at fault."""


class ResourceManager:
    """The pools `specs` of one run, in `store` under `name`. `run` is unique among the runs of the store.

    lease_s: how long after its last sign of life a run's bindings are its own.
    warn: told, in one line, of what a person should know (a lost store, devices taken back).

    `on_taken`, set by whoever has workers on the bindings, hears of each that another run has got, and of that run: it
    is nobody's here any more, and its worker must leave the devices.
    """

    def __init__(
        self,
        store: MetadataStore,
        specs: Iterable[PoolSpec],
        run: str,
        *,
        name: str = "default",
        lease_s: float = 30.0,
        warn: Callable[[str], None] = log.warning,
    ) -> None:
        self._store = store
        self._specs = list(specs)
        self._run = run
        self._key = f"pools/{name}"
        self._name = name
        self._lease_s = lease_s
        self._warn = warn
        self._mine: dict[str, Binding] = {}
        self._lost: list[str] = []
        self._gone: set[str] = set()
        self._beating: asyncio.Task[None] | None = None
        self.on_taken: Callable[[Binding, str], None] = lambda *_: None

    # --------------------------------------------------------------------------------------------------- life cycle
    async def open(self) -> None:
        """Take the lease, declare the pools, begin to beat. Raises ConfigError, ResourceError."""
        if (await self._ask(self._store.held, [self._lease]))[0]:
            raise ConfigError(f"run {self._run!r}: a run of that name is alive in this store; take another log.name")
        await self._ask(self._store.renew, self._lease, self._lease_s)
        await self._change(self._begin)
        self._beating = asyncio.get_running_loop().create_task(self._beat(), name="resource lease")

    async def close(self) -> None:
        """Give everything back. Never raises: a store that is away lets the lease end by itself."""
        if self._beating is not None:
            self._beating.cancel()
            await asyncio.gather(self._beating, return_exceptions=True)
        self._mine.clear()
        try:
            await self._change(lambda pools: pools.release_run(self._run))
            await self._ask(self._store.drop, self._lease)
        except (ResourceError, ConfigError) as error:
            self._warn(f"resources were not given back, their lease ends by itself: {error}")
        self._store.close()

    # ----------------------------------------------------------------------------------------------------- bindings
    async def bind(
        self, worker: str, role: str, device_class: str, num_devices: int = 1, avoid: Collection[str] = ()
    ) -> Binding:
        """Devices for one worker. Raises ConfigError for an unknown class, ResourceError when none is free."""
        return (await self.bind_all([Wanted(worker, role, device_class, num_devices)], avoid))[0]

    async def bind_all(self, wanted: Sequence[Wanted], avoid: Collection[str] = ()) -> list[Binding]:
        """Devices for many workers, in order: for all of them or, when it raises what `bind` does, for none."""

        def bind(pools: Pools) -> list[Binding]:
            return [
                pools.bind(f"{self._run}/{each.worker}", each.role, each.device_class, each.num_devices, avoid)
                for each in wanted
            ]

        bindings = await self._change(bind)
        for each, binding in zip(wanted, bindings, strict=True):
            self._mine[binding.binding_id] = binding
            if binding.fell_back:
                self._warn(f"{each.worker}: no {each.device_class} is free; it runs on {binding}")
        return bindings

    async def release(self, binding: Binding) -> None:
        """Give one binding back. Raises ResourceError."""
        self._mine.pop(binding.binding_id, None)
        await self._change(lambda pools: pools.release(binding.binding_id))

    async def fail(self, binding: Binding) -> None:
        """The devices of a binding are broken: nobody gets them any more. Raises ResourceError."""
        self._note_loss(f"{binding}")
        await self._change(lambda pools: pools.fail(binding.pool, binding.node, binding.devices))
        self._mine.pop(binding.binding_id, None)

    async def fail_node(self, node: str) -> list[Binding]:
        """A node is gone, as another run may have said before; the bindings of this run that were on it.

        Raises ResourceError.
        """
        self._note_loss(f"node {node}")
        await self._change(lambda pools: pools.fail_node(node))
        lost = [binding for binding in self._mine.values() if binding.node == node]
        for binding in lost:
            del self._mine[binding.binding_id]
        return lost

    # --------------------------------------------------------------------------------------------------------- view
    @property
    def bindings(self) -> list[Binding]:
        """What this run holds."""
        return list(self._mine.values())

    async def is_ours(self, binding: Binding) -> bool:
        """Whether nobody else is on its devices: a run that was frozen beyond its lease may find that.

        While the store is away, what is bound stays bound.
        """
        if binding.binding_id not in self._mine:
            return False
        try:
            _, document = await self._ask(self._store.read, self._key)
        except ResourceError:
            return True
        try:
            pools = self._decoded(document)
            pools.declare(self._specs)
            if pools.binding(binding.binding_id) is None:
                pools.adopt(binding)
        except ResourceError:
            return False
        return pools.binding(binding.binding_id) == binding

    @property
    def lost(self) -> list[str]:
        """What this run has seen break."""
        return list(self._lost)

    async def pools(self) -> Pools:
        """The view as it is now, without runs that are dead. Raises ResourceError."""
        return (await self._look())[1]

    async def rows(self) -> list[PoolRow]:
        """The view as rows of a table. Raises ResourceError."""
        return (await self.pools()).rows()

    async def repair(self, node: str) -> None:
        """A person says that the devices of a node work again. Raises ConfigError for an unknown node."""
        pools = await self.pools()
        homes = [name for name, spec in pools.specs.items() if node in spec.nodes]
        if not homes:
            known = sorted({row.node for row in pools.rows()})
            raise ConfigError(f"node {node!r}: no pool has it{nearest(node, known)}")
        for name in homes:
            await self._change(lambda view, name=name: view.repair(name, node))  # type: ignore[misc]

    # ------------------------------------------------------------------------------------------------------- inside
    def _begin(self, pools: Pools) -> None:
        """Nothing is held yet under this name; the nodes that this run sees are there."""
        pools.release_run(self._run)
        pools.returned(self._specs)

    @property
    def _lease(self) -> str:
        return f"{self._name}/{self._run}"

    async def _change(self, change: Callable[[Pools], T]) -> T:
        """Apply `change` to the newest view and write it; again, when another run was faster."""
        for _ in range(ATTEMPTS):
            revision, pools = await self._look()
            result = change(pools)
            if await self._ask(self._store.swap, self._key, revision, msgspec.msgpack.encode(pools.state())):
                return result
        raise ResourceError(f"the view of pools {self._name!r} changed {ATTEMPTS} times while it was being written")

    async def _look(self) -> tuple[int, Pools]:
        """The newest view with this run's pools and bindings in it, and with no dead run in it."""
        revision, pools = await self._living()
        pools.declare(self._specs)
        for binding in self._mine.values():
            if pools.binding(binding.binding_id) is None:
                with contextlib.suppress(ResourceError):  # another run has got its devices, or has seen them break
                    pools.adopt(binding)
        return revision, pools

    async def _living(self) -> tuple[int, Pools]:
        """The newest view without dead runs."""
        revision, document = await self._ask(self._store.read, self._key)
        pools = self._decoded(document)
        others = sorted(pools.runs() - {self._run})
        alive = await self._ask(self._store.held, [f"{self._name}/{run}" for run in others]) if others else []
        for run, lives in zip(others, alive, strict=True):
            if not lives:
                self._note_gone(run, len(pools.release_run(run)))
        return revision, pools

    def _decoded(self, document: bytes) -> Pools:
        """Raises ResourceError for what is no view."""
        try:
            return Pools.of(msgspec.msgpack.decode(document)) if document else Pools()
        except msgspec.DecodeError as error:
            raise ResourceError(
                f"the stored view of pools {self._name!r} is damaged ({error}); delete it, and runs write it anew"
            ) from error

    def _note_gone(self, run: str, num_bindings: int) -> None:
        """Told once, though it is seen until somebody writes the view."""
        if run not in self._gone:
            self._gone.add(run)
            self._warn(f"run {run!r} is gone without giving its devices back: {num_bindings} bindings taken back")

    async def _beat(self) -> None:
        """Renew the lease for ever; put back what the store has lost, and let go of what others have got."""
        away = False
        while True:
            await asyncio.sleep(self._lease_s / BEATS_PER_LEASE)
            try:
                await self._ask(self._store.renew, self._lease, self._lease_s)
                if away or self._mine:
                    await self._restore()
                if away:
                    self._warn("the metadata store is back")
                away = False
            except (ResourceError, ConfigError) as error:
                if not away:
                    self._warn(f"{error}; the run goes on with what it has, and asks again")
                away = True

    async def _restore(self) -> None:
        """Write again what a store that restarted without its data, or after this run's lease, no longer knows."""
        _, pools = await self._living()
        for binding in [each for each in self._mine.values() if pools.binding(each.binding_id) is None]:
            if runs := pools.in_the_way(binding):
                self._let_go(binding, runs[0])
        if any(pools.binding(binding_id) is None for binding_id in self._mine):
            await self._change(_nothing)

    def _let_go(self, binding: Binding, run: str) -> None:
        del self._mine[binding.binding_id]
        self._warn(
            f"{binding} has gone to run {run!r}: this run gave no sign of life for {self._lease_s:g} s "
            "(resources.lease_s); was it stopped, or its machine asleep?"
        )
        self.on_taken(binding, run)

    async def _ask(self, call: Callable[..., T], *arguments: object) -> T:
        return await asyncio.to_thread(call, *arguments)

    def _note_loss(self, what: str) -> None:
        if what not in self._lost:
            self._lost.append(what)
            self._warn(f"lost: {what}")


def _nothing(_: Pools) -> None:
    """Only write the view, with what this run holds in it."""
