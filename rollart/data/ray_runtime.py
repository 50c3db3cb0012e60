"""The Ray runtime: a worker is an actor, placed on the node and devices of its binding. The only file that imports ray.

Calls carry MessagePack bytes, as between local processes, so that a worker cannot tell where it runs. Arguments beyond
64 KiB travel as object references, large results too (Ray does so by itself), from the node that has them to the
node that needs them. What a binding takes of Ray's own accounting (GPUs, custom resources) is a placement group of one
bundle, so that another run, or another program, on the same cluster never gets the same devices; a worker on CPU cores
takes nothing and is only pinned to its node.

Invariants: a cluster that this process did not start is left as it was found, but for our own actors and groups, which
are gone when the run is; a call whose actor is gone raises WorkerDied; a node is known to be dead before the death of
a worker on it is told; the death of the raylet or the GCS that this process hangs on is told before Ray ends it. What
this file leaves out: which devices (`resource/`), what a node has (`ray_nodes.py`), calls of an actor (`ray_worker.py`)
and its inside (`ray_actor.py`), how servers are heard to die (`ray_pulse.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import importlib
import logging
import os
import signal
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

from rollart import toml
from rollart.data.ray_actor import Actor, Order
from rollart.data.ray_nodes import NodeNames, RayNode, bundle_of, node_info, shortage
from rollart.data.ray_pulse import Home, patience_s
from rollart.data.ray_worker import RayWorker
from rollart.errors import ConfigError, ResourceError, WorkerDied, boundary, to_install
from rollart.protocols import WorkerHandle
from rollart.types import Binding, NodeInfo

PLACE_TIMEOUT_S = 60.0
PLACE_LOOK_S = 2.0
"""How often a worker that waits for its place asks whether the node is still there."""
MAX_CALLS = 100_000
"""Calls at once in one actor: an environment worker holds one per environment."""
NAMESPACE = "rollart"
LOOPBACK = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
"""Ray's switch for clusters of several machines; "0" makes a cluster that starts here listen on loopback alone."""
RAYLET_PID = "RAY_RAYLET_PID"
"""Where Ray has the id of the process that a driver must not outlive: without it its parent, so that one whose parent
is gone (nohup, a container) ends on the spot when its raylet dies. With the driver's own id, Ray gives errors instead.
"""
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
    with _environment({LOOPBACK: "0", RAYLET_PID: str(os.getpid())}):
        try:
            return importlib.import_module("ray")
        except ImportError:
            raise ConfigError(f'runtime: "ray" needs an extra; {to_install("ray")}') from None


@contextlib.contextmanager
def _environment(defaults: Mapping[str, str]) -> Iterator[None]:
    """Variables that are set inside, where they are not set anyway."""
    added = {key: value for key, value in defaults.items() if not os.environ.get(key)}
    os.environ.update(added)
    try:
        yield
    finally:
        for key in added:
            del os.environ[key]


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
        self._home: Home | None = None
        self._listening: asyncio.Task[None] | None = None
        self._is_lost = False

    async def nodes(self) -> list[NodeInfo]:
        """The living nodes of the cluster."""
        return [node_info(name, node) for name, node in (await self._nodes()).items()]

    async def spawn(
        self, name: str, target: str, kwargs: Mapping[str, Any], binding: Binding | None = None
    ) -> WorkerHandle:
        """Start an actor and build `target(**kwargs)` in it.

        Raises what the construction raised, or ResourceError when the node gives no room within `place_timeout_s`.
        """
        self._listening = self._listening or asyncio.create_task(self._listen(), name="Ray's raylet")
        log = self._log_folder / f"{name}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        options, give_back = await self._place(name, binding)
        environ = ENVIRON if binding is None or binding.device == "cuda" else {**ENVIRON, "CUDA_VISIBLE_DEVICES": ""}
        unique = f"{name}-{uuid.uuid4().hex}"
        kind = self._ray.remote(num_cpus=0, max_concurrency=MAX_CALLS, max_restarts=0, **options)(Actor)
        actor = kind.options(name=unique, namespace=NAMESPACE).remote()
        worker = RayWorker(self._ray, name, actor, unique, log, give_back)
        self._workers.append(worker)
        try:
            await worker.greet(f"node {binding.node}" if binding is not None else "its node")
            await worker.build(Order(target, dict(kwargs), os.getcwd(), str(log), environ))
        except BaseException:
            await worker.stop()
            raise
        return worker

    async def wait_lost(self) -> str:
        """What has died, once the GCS has been away for a third of the time after which Ray ends this process."""
        reason = await (await self._at_home()).gcs_lost(patience_s(os.environ))
        self._is_lost = True
        return reason

    async def shutdown(self) -> None:
        """End our actors and their groups; the cluster only where we started it."""
        if self._listening is not None:
            self._listening.cancel()
            self._listening = None
        workers, self._workers = self._workers, []
        await asyncio.gather(*(worker.stop(self._is_lost) for worker in workers), return_exceptions=True)
        if self._is_open:
            self._is_open = False
            if not self._is_lost:
                await asyncio.to_thread(Connection.leave, self._ray)

    # ------------------------------------------------------------------------------------------------------ inside
    async def _at_home(self) -> Home:
        if self._home is None:
            context = self._ray.get_runtime_context()
            with boundary(ResourceError, "Ray's list of nodes"):
                nodes = await asyncio.to_thread(self._ray.nodes)
            here = next(node for node in nodes if node["NodeID"] == context.get_node_id())
            self._home = Home.of(here, context.gcs_address)
        return self._home

    async def _listen(self) -> None:
        """When the raylet of this process dies, so do all workers, a little later."""
        reason = await (await self._at_home()).raylet_lost()
        for worker in self._workers:
            worker.bury(reason)

    async def _nodes(self) -> dict[str, RayNode]:
        with boundary(ResourceError, "Ray's list of nodes"):
            return self._names.of(await asyncio.to_thread(self._ray.nodes))

    async def _node(self, name: str, binding: Binding) -> RayNode:
        nodes = await self._nodes()
        if binding.node not in nodes:
            raise ResourceError(f"worker {name}: node {binding.node} has left the Ray cluster")
        return nodes[binding.node]

    async def _place(self, name: str, binding: Binding | None) -> tuple[dict[str, Any], Callable[[], None]]:
        """The options that put an actor on its binding, and what gives its place back."""
        if binding is None:
            return {}, lambda: None
        node = await self._node(name, binding)
        bundle = bundle_of(binding, node)
        if not bundle:
            strategy = self._strategies.NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
            return {"scheduling_strategy": strategy}, lambda: None
        if lacks := shortage(bundle, node):
            raise ResourceError(
                f"worker {name}: node {binding.node} has {lacks}; to emulate the class on CPU, set "
                f'pools.{toml.key(binding.pool)}.device = "cpu"'
            )
        here = {"ray.io/node-id": node["NodeID"]}
        group = self._util.placement_group([bundle], strategy="STRICT_PACK", bundle_label_selector=[here])
        try:
            await self._room(name, binding, group, bundle)
        except BaseException:
            self._util.remove_placement_group(group)
            raise
        strategy = self._strategies.PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=0)
        give_back = functools.partial(self._util.remove_placement_group, group)
        return {"scheduling_strategy": strategy, "num_gpus": bundle.get("GPU", 0)}, give_back

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
    return RayWorker(ray, name, actor, unique, None, owned=False)
