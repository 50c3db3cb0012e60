"""The Ray runtime: a worker is an actor, placed on the node and devices of its binding. The only file that imports ray.

Calls carry MessagePack bytes, as between local processes, so that a worker cannot tell where it runs. Arguments beyond
`BULK_BYTES` travel as object references, large results too (Ray does so by itself), from the node that has them to the
node that needs them. What a binding takes of Ray's own accounting (GPUs, custom resources) is a placement group of one
bundle, so that another run, or another program, on the same cluster never gets the same devices; a worker on CPU cores
takes nothing and is only pinned to its node.

Invariants: a cluster that this process did not start is left as it was found, but for our own actors and groups, which
are gone when the run is; a call whose actor is gone raises WorkerDied; a node is known to be dead before the death of
a worker on it is told. What this file leaves out: which devices (`resource/`), what a node has (`ray_nodes.py`), the
inside of an actor (`ray_actor.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import logging
import os
import signal
import threading
import time
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import msgspec

from rollart import __version__
from rollart.data.handshake import check_greeting
from rollart.data.ray_actor import Actor, Order
from rollart.data.ray_nodes import NodeNames, RayNode, bundle_of, node_info
from rollart.data.runtime import last_output
from rollart.data.wire import Answer, encode
from rollart.errors import ConfigError, ResourceError, WorkerDied, WorkerError, boundary, to_install
from rollart.protocols import WorkerHandle
from rollart.types import Binding, NodeInfo

BULK_BYTES = 64 << 10
"""Larger arguments go through the object store."""
PLACE_TIMEOUT_S = 60.0
PLACE_LOOK_S = 2.0
"""How often a worker that waits for its place asks whether the node is still there."""
STOP_TIMEOUT_S = 5.0
MAX_CALLS = 100_000
"""Calls at once in one actor: an environment worker holds one per environment."""
UNSURE_S = 60.0
"""How long an actor may be out of reach, all in all, before it counts as dead without a word of Ray's."""
NAMESPACE = "rollart"
BEGINNING = "creation task"
"""In Ray's words for an actor whose constructor failed."""
UNSURE_LOOK_S = 0.5
LOOPBACK = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
"""Ray's switch for clusters of several machines; "0" makes a cluster that starts here listen on loopback alone."""
ENVIRON = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}


class Connection:
    """This process' one connection to Ray, however many runtimes use it: opened by the first, closed by the last.

    What the caller's own program has opened is used and left open.
    """

    users: ClassVar[int] = 0
    opened: ClassVar[bool] = False
    turn: ClassVar[threading.Lock] = threading.Lock()

    @classmethod
    def enter(cls) -> Any:
        """The module `ray`, connected. Raises ConfigError without ray, ResourceError without a cluster."""
        ray = _imported()
        with cls.turn:
            if not ray.is_initialized():
                with _signals_kept():
                    _connect(ray)
                cls.opened = True
            cls.users += 1
        return ray

    @classmethod
    def leave(cls, ray: Any) -> None:
        """One user less. A cluster that was started here ends with the last, any other goes on."""
        with cls.turn:
            cls.users -= 1
            if not cls.users and cls.opened:
                cls.opened = False
                with _signals_kept():
                    ray.shutdown()


def _imported() -> Any:
    """The module. Unless it is loaded already, a cluster that it starts here keeps to the loopback interface.

    Without that, Ray looks for the address of this machine by its default route, which there may not be, and listens on
    all interfaces.
    """
    kept = os.environ.get(LOOPBACK)
    os.environ[LOOPBACK] = kept or "0"
    try:
        return importlib.import_module("ray")
    except ImportError:
        raise ConfigError(f'runtime: "ray" needs an extra; {to_install("ray")}') from None
    finally:
        if kept is None:
            del os.environ[LOOPBACK]


def _connect(ray: Any) -> None:
    """To RAY_ADDRESS, else to what `ray start` has started on this machine, else to a cluster of this process alone."""
    address = address_of(os.environ)
    options = {"log_to_driver": False, "logging_level": logging.ERROR, "include_dashboard": False}
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    with boundary(ResourceError, f"Ray at {address or 'this machine'}"):
        try:
            ray.init(**options)
        except ConnectionError as error:
            if address:
                raise ResourceError(
                    f"Ray at {address}: {error}; is it started there, and does it want a token? Give the run the same "
                    "RAY_AUTH_MODE and token as `ray start` (docs/ray.md)"
                ) from error
            ray.init(address="local", **options)  # what was started here once is gone


def address_of(environ: Mapping[str, str]) -> str:
    """The address of a cluster that the environment names, or nothing. Raises ConfigError for one that cannot serve."""
    address = environ.get("RAY_ADDRESS", "")
    if address.startswith("ray://"):
        raise ConfigError(f"RAY_ADDRESS: {address!r} is a Ray Client; name the cluster itself, such as 10.0.0.1:6379")
    return address


@contextlib.contextmanager
def _signals_kept() -> Iterator[None]:
    """Ray takes SIGTERM for itself; what the run makes of it counts."""
    kept = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):  # not in the main thread, where Ray takes none
            signal.signal(signal.SIGTERM, kept)


class RayRuntime:
    """Workers as actors of one cluster. Their output goes to `log_folder` where their node has it.

    Raises ConfigError when ray is not installed, ResourceError when the cluster cannot be reached.
    """

    def __init__(self, log_folder: Path, place_timeout_s: float = PLACE_TIMEOUT_S) -> None:
        self._ray = Connection.enter()
        self._util = importlib.import_module("ray.util")
        self._strategies = importlib.import_module("ray.util.scheduling_strategies")
        self._is_open = True
        self._log_folder = log_folder.resolve()
        self._place_timeout_s = place_timeout_s
        self._names = NodeNames()
        self._workers: list[RayWorker] = []

    async def nodes(self) -> list[NodeInfo]:
        """The living nodes of the cluster."""
        return [node_info(name, node) for name, node in (await self._nodes()).items()]

    async def spawn(
        self, name: str, target: str, kwargs: Mapping[str, Any], binding: Binding | None = None
    ) -> WorkerHandle:
        """Start an actor and build `target(**kwargs)` in it.

        Raises what the construction raised, or ResourceError when the node gives no room within `place_timeout_s`.
        """
        log = self._log_folder / f"{name}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        options, group = await self._place(name, binding)
        environ = ENVIRON if binding is None or binding.device == "cuda" else {**ENVIRON, "CUDA_VISIBLE_DEVICES": ""}
        unique = f"{name}-{uuid.uuid4().hex}"
        kind = self._ray.remote(num_cpus=0, max_concurrency=MAX_CALLS, max_restarts=0, **options)(Actor)
        actor = kind.options(name=unique, namespace=NAMESPACE).remote()
        worker = RayWorker(self._ray, name, actor, unique, group, log)
        self._workers.append(worker)
        try:
            await worker.greet(f"node {binding.node}" if binding is not None else "its node")
            await worker.build(Order(target, dict(kwargs), os.getcwd(), str(log), environ))
        except BaseException:
            await worker.stop()
            raise
        return worker

    async def shutdown(self) -> None:
        """End our actors and their groups; the cluster only where we started it."""
        workers, self._workers = self._workers, []
        await asyncio.gather(*(worker.stop() for worker in workers), return_exceptions=True)
        if self._is_open:
            self._is_open = False
            await asyncio.to_thread(Connection.leave, self._ray)

    # ------------------------------------------------------------------------------------------------------ inside
    async def _nodes(self) -> dict[str, RayNode]:
        with boundary(ResourceError, "Ray's list of nodes"):
            return self._names.of(await asyncio.to_thread(self._ray.nodes))

    async def _node(self, name: str, binding: Binding) -> RayNode:
        nodes = await self._nodes()
        if binding.node not in nodes:
            raise ResourceError(f"worker {name}: node {binding.node} has left the Ray cluster")
        return nodes[binding.node]

    async def _place(self, name: str, binding: Binding | None) -> tuple[dict[str, Any], Any]:
        """The options that put an actor on its binding, and the placement group that holds its place, if any."""
        if binding is None:
            return {}, None
        node = await self._node(name, binding)
        bundle = bundle_of(binding, node)
        if not bundle:
            strategy = self._strategies.NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
            return {"scheduling_strategy": strategy}, None
        here = {"ray.io/node-id": node["NodeID"]}
        group = self._util.placement_group([bundle], strategy="STRICT_PACK", bundle_label_selector=[here])
        try:
            await self._room(name, binding, group, bundle)
        except BaseException:
            self._util.remove_placement_group(group)
            raise
        strategy = self._strategies.PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=0)
        return {"scheduling_strategy": strategy, "num_gpus": bundle.get("GPU", 0)}, group

    async def _room(self, name: str, binding: Binding, group: Any, bundle: Mapping[str, float]) -> None:
        """Wait for the group's place. Raises ResourceError when its node leaves or gives none."""
        deadline = time.monotonic() + self._place_timeout_s
        while not await asyncio.to_thread(group.wait, min(PLACE_LOOK_S, self._place_timeout_s)):
            await self._node(name, binding)
            if time.monotonic() > deadline:
                raise ResourceError(
                    f"worker {name}: Ray gave no room for {bundle} on node {binding.node} within "
                    f"{self._place_timeout_s:g} s, for another program on the cluster holds it; runs that share a "
                    "resources.store see what others hold"
                )


async def connect(name: str, unique: str) -> RayWorker:
    """A handle for another worker of the run, inside an actor. Raises WorkerDied when there is no such actor."""
    ray = importlib.import_module("ray")
    try:
        actor = await asyncio.to_thread(ray.get_actor, unique, NAMESPACE)
    except ValueError as error:
        raise WorkerDied(f"worker {name} is not on the Ray cluster any more") from error
    return RayWorker(ray, name, actor, unique, None, None, owned=False)


class RayWorker:
    """One actor, seen from the driver that owns it, or from another worker."""

    def __init__(
        self, ray: Any, name: str, actor: Any, unique: str, group: Any, log: Path | None, owned: bool = True
    ) -> None:
        self.name = name
        self._unique = unique
        self._owned = owned
        self._ray = ray
        self._actor = actor
        self._call = actor.call.remote
        self._group = group
        self._log = log
        self._lost = ray.exceptions.RayError
        self._raised = ray.exceptions.RayTaskError
        loop = asyncio.get_running_loop()
        self._death: asyncio.Future[str] = loop.create_future()
        self._watching = loop.create_task(self._watch(), name=f"watch {name}")

    async def greet(self, node: str) -> None:
        """Hear which rollart the actor is of. Raises ResourceError when it is another one, or none; WorkerDied."""
        try:
            theirs = await self._actor.hello.remote()
        except self._lost as error:
            if isinstance(error, self._raised) or BEGINNING in str(error):
                raise ResourceError(
                    f"worker {self.name}: {node} cannot begin it ({_last_line(error)}); has it the rollart "
                    f"{__version__} of this process, with its packages?"
                ) from error
            raise WorkerDied(f"worker {self.name}, first call: {self._described(error)}") from error
        check_greeting(theirs, f"worker {self.name}: {node}")

    async def build(self, order: Order) -> None:
        """Build the object. Raises what that raised."""
        await self._answer("__build__", self._actor.build.remote(encode(order)))

    async def call(self, method: str, *args: Any, returns: Any = Any) -> Any:
        """Call a method of the object in the actor."""
        if self._death.done():
            raise WorkerDied(f"worker {self.name}, call {method}: {self._death.result()}")
        payload: Any = encode(args)
        if len(payload) > BULK_BYTES:
            payload = await asyncio.to_thread(self._ray.put, payload)
        return msgspec.msgpack.decode(await self._answer(method, self._call(method, payload)), type=returns)

    async def address(self) -> str:
        """Where other workers reach it, by `peers.connect`."""
        return f"ray:{self._unique}"

    async def wait_dead(self) -> str:
        """The reason, once the actor is gone."""
        return await asyncio.shield(self._death)

    async def stop(self) -> None:
        """Ask the object to close, then end the actor and give its place back; who does not own it only lets go."""
        if not self._owned:
            self._watching.cancel()
            self._bury("the connection was closed")
            return
        if not self._death.done():
            with contextlib.suppress(TimeoutError, self._lost):
                await asyncio.wait_for(self._actor.close.remote(), STOP_TIMEOUT_S)
            self._ray.kill(self._actor)
            self._bury("it was stopped")
        await asyncio.wait({self._watching}, timeout=STOP_TIMEOUT_S)
        self._watching.cancel()
        if self._group is not None:
            group, self._group = self._group, None
            importlib.import_module("ray.util").remove_placement_group(group)

    # ------------------------------------------------------------------------------------------------------ inside
    async def _answer(self, method: str, reference: Any) -> msgspec.Raw:
        """What an actor answered. Raises what it raised, or WorkerDied."""
        try:
            reply = msgspec.msgpack.decode(await reference, type=Answer)
        except self._raised as error:
            raise WorkerError(f"worker {self.name}, call {method}: {error}") from error
        except self._lost as error:
            raise WorkerDied(f"worker {self.name}, call {method}: {self._described(error)}") from error
        if reply.failure is not None:
            raise reply.failure.raised_by(self.name, method)
        return reply.result

    async def _watch(self) -> None:
        """Wait for the end of a call that never returns: it fails with the actor.

        Out of reach is not dead yet: Ray fails the calls, and says a second later whether the actor's node is gone.
        """
        doubted = 0.0
        while True:
            try:
                await self._actor.park.remote()
            except self._ray.exceptions.ActorUnavailableError as error:
                doubted += UNSURE_LOOK_S
                if doubted < UNSURE_S:
                    await asyncio.sleep(UNSURE_LOOK_S)
                    continue
                if self._owned:
                    self._ray.kill(self._actor)
                self._bury(self._described(error))
            except self._lost as error:
                self._bury(self._described(error))
            return

    def _bury(self, reason: str) -> None:
        if not self._death.done():
            self._death.set_result(reason)

    def _described(self, error: BaseException) -> str:
        """Ray's words in short, and the last ones of the actor."""
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        return " ".join(lines[:3] if len(lines) < 8 else [*lines[:2], lines[-1]]) + (
            last_output(self._log) if self._log else ""
        )


def _last_line(error: BaseException) -> str:
    return next((line.strip() for line in reversed(str(error).splitlines()) if line.strip()), type(error).__name__)
