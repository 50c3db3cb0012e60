"""The Ray runtime: a worker is an actor, placed on the node and devices of its binding. The only file that imports ray.

Calls carry MessagePack bytes, as between local processes, so that a worker cannot tell where it runs; arguments and
results beyond `BULK_BYTES` travel as object references, from the node that has them to the node that needs them.
Each actor sits in a placement group of one bundle that takes what the binding says from Ray's own accounting, so that
another run, or another program, on the same cluster never gets the same devices.

Invariants: a cluster that this process did not start is left as it was found, but for our own actors and groups, which
are gone when the run is; a call whose actor is gone raises WorkerDied. What this file leaves out: which devices
(`resource/`), the objects inside actors (`worker.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from rollart.data.wire import Answer, Call, encode
from rollart.data.worker import Host, answer, build
from rollart.errors import ConfigError, ResourceError, WorkerDied, boundary
from rollart.protocols import WorkerHandle
from rollart.resource.classes import CPU, class_of
from rollart.types import Binding, NodeInfo

BULK_BYTES = 64 << 10
"""Larger payloads go through the object store."""
PLACE_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 5.0
MAX_CALLS = 100_000
"""Calls at once in one actor: an environment worker holds one per environment."""
MARGIN = 0.001
"""Share of a core that a worker on CPU takes from Ray's accounting: ours counts them."""
KNOWN = ("CPU", "GPU", "memory", "object_store_memory")


class RayRuntime:
    """Connects to `RAY_ADDRESS`, or to the cluster of this machine, else starts one for this run alone.

    Raises ConfigError when ray is not installed, ResourceError when the cluster cannot be reached.
    """

    def __init__(self, log_folder: Path) -> None:
        try:
            self._ray: Any = importlib.import_module("ray")
        except ImportError:
            raise ConfigError("runtime: 'ray' needs the extra: pip install 'rollart[ray]'") from None
        self._log_folder = log_folder
        self._workers: list[RayWorker] = []
        self._ours = False
        self._connect()

    def _connect(self) -> None:
        if self._ray.is_initialized():
            return
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        options = {"log_to_driver": False, "logging_level": logging.WARNING, "namespace": "rollart"}
        with boundary(ResourceError, "Ray"):
            try:
                self._ray.init(address=os.environ.get("RAY_ADDRESS", "auto"), **options)
            except ConnectionError:
                if "RAY_ADDRESS" in os.environ:
                    raise
                self._ray.init(address="local", include_dashboard=False, _node_ip_address="127.0.0.1", **options)
                self._ours = True

    async def nodes(self) -> list[NodeInfo]:
        """The living nodes of the cluster: custom resources are classes, GPUs go by their model, CPUs are cores."""
        with boundary(ResourceError, "Ray's list of nodes"):
            known = await asyncio.to_thread(self._ray.nodes)
        return [_node(each) for each in known if each["Alive"]]

    async def spawn(
        self, name: str, target: str, kwargs: Mapping[str, Any], binding: Binding | None = None
    ) -> WorkerHandle:
        """Start an actor and build `target(**kwargs)` in it.

        Raises what the construction raised, or ResourceError when the node gives no room within `PLACE_TIMEOUT_S`.
        """
        group = await self._reserve(name, binding)
        options: dict[str, Any] = {"num_cpus": 0, "max_concurrency": MAX_CALLS, "max_restarts": 0}
        if group is not None and binding is not None:
            options["scheduling_strategy"] = importlib.import_module(
                "ray.util.scheduling_strategies"
            ).PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=0)
            if binding.device == "cuda":
                options["num_gpus"] = len(binding.devices)
        environment = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        options["runtime_env"] = {"env_vars": environment}
        actor = self._ray.remote(**options)(_Actor).remote(target, msgspec.msgpack.encode(dict(kwargs)), os.getcwd())
        worker = RayWorker(self._ray, name, actor, group)
        self._workers.append(worker)
        try:
            await worker.call("__build__")
        except BaseException:
            await worker.stop()
            raise
        worker.watch()
        return worker

    async def _reserve(self, name: str, binding: Binding | None) -> Any:
        """A placement group of one bundle on the binding's node."""
        if binding is None:
            return None
        util = importlib.import_module("ray.util")
        known = {_name(each): each for each in await asyncio.to_thread(self._ray.nodes) if each["Alive"]}
        if binding.node not in known:
            raise ResourceError(f"worker {name}: node {binding.node} has left the Ray cluster")
        node = known[binding.node]
        bundle: dict[str, float] = {}
        if binding.device == "cuda":
            bundle["GPU"] = float(len(binding.devices))
        if binding.device_class in node["Resources"] and binding.device_class not in KNOWN:
            bundle[binding.device_class] = float(len(binding.devices))
        bundle = bundle or {"CPU": MARGIN}
        here = {"ray.io/node-id": node["NodeID"]}
        group = util.placement_group([bundle], strategy="STRICT_PACK", bundle_label_selector=[here])
        if not await asyncio.to_thread(group.wait, PLACE_TIMEOUT_S):
            util.remove_placement_group(group)
            raise ResourceError(
                f"worker {name}: Ray gave no room for {bundle} on node {binding.node} within {PLACE_TIMEOUT_S:g} s; "
                "another program on the cluster holds it"
            )
        return group

    async def shutdown(self) -> None:
        """End our actors and their groups; the cluster only where we started it."""
        workers, self._workers = self._workers, []
        await asyncio.gather(*(worker.stop() for worker in workers), return_exceptions=True)
        if self._ours:
            self._ours = False
            await asyncio.to_thread(self._ray.shutdown)


class _Actor:
    """Holds the worker's object; its methods run on the actor's event loop, as in a local worker process."""

    def __init__(self, target: str, kwargs: bytes, folder: str) -> None:
        self._target, self._kwargs, self._folder = target, kwargs, folder
        self._host: Host | None = None

    async def call(self, method: str, arguments: bytes) -> bytes:
        """One call: encoded arguments in, an encoded `Answer` out."""
        if method == "__build__":
            return await self._build()
        assert self._host is not None
        return encode(
            await answer(self._host, Call(0, method, msgspec.msgpack.decode(arguments, type=list[msgspec.Raw])))
        )

    async def _build(self) -> bytes:
        from rollart.data.wire import Failure

        with contextlib.suppress(OSError):  # another machine may not have the driver's folder
            os.chdir(self._folder)
        try:
            host = Host(await asyncio.to_thread(build, self._target, msgspec.msgpack.decode(self._kwargs)))
            await host.start()
        except Exception as error:
            return encode(Answer(0, failure=Failure.of(error)))
        self._host = host
        return encode(Answer(0))

    async def close(self) -> None:
        """Let the object close what it holds."""
        if self._host is not None:
            await self._host.close()

    async def park(self) -> None:
        """Never returns: the call fails when the actor is gone."""
        await asyncio.Event().wait()


class RayWorker:
    """Driver's side of one actor."""

    def __init__(self, ray: Any, name: str, actor: Any, group: Any) -> None:
        self.name = name
        self._ray = ray
        self._actor = actor
        self._group = group
        self._death: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._watching: asyncio.Task[None] | None = None

    def watch(self) -> None:
        """Begin to wait for the actor's death."""
        self._watching = asyncio.get_running_loop().create_task(self._watch(), name=f"watch {self.name}")

    async def call(self, method: str, *args: Any, returns: Any = Any) -> Any:
        """Call a method of the object in the actor."""
        if self._death.done():
            raise WorkerDied(f"worker {self.name}, call {method}: {self._death.result()}")
        payload: Any = encode([msgspec.Raw(encode(argument)) for argument in args])
        if len(payload) > BULK_BYTES:
            payload = self._ray.put(payload)
        try:
            reply = msgspec.msgpack.decode(await self._actor.call.remote(method, payload), type=Answer)
        except self._ray.exceptions.RayActorError as error:
            raise WorkerDied(f"worker {self.name}, call {method}: {_short(error)}") from error
        except self._ray.exceptions.RayError as error:
            raise WorkerDied(f"worker {self.name}, call {method}: its answer was lost: {_short(error)}") from error
        if reply.failure is not None:
            raise reply.failure.raised_by(self.name, method)
        return msgspec.msgpack.decode(reply.result, type=returns)

    async def wait_dead(self) -> str:
        """The reason, once the actor is gone."""
        return await asyncio.shield(self._death)

    async def stop(self) -> None:
        """Ask the object to close, then end the actor and give its place back."""
        if self._watching is not None:
            self._watching.cancel()
        if not self._death.done():
            with contextlib.suppress(TimeoutError, self._ray.exceptions.RayError):
                await asyncio.wait_for(self._actor.close.remote(), STOP_TIMEOUT_S)
            self._ray.kill(self._actor)
            self._bury("it was stopped")
        if self._group is not None:
            group, self._group = self._group, None
            importlib.import_module("ray.util").remove_placement_group(group)

    async def _watch(self) -> None:
        try:
            await self._actor.park.remote()
        except self._ray.exceptions.RayError as error:
            self._bury(_short(error))

    def _bury(self, reason: str) -> None:
        if not self._death.done():
            self._death.set_result(reason)


def _node(node: Mapping[str, Any]) -> NodeInfo:
    resources, labels = node["Resources"], node.get("Labels", {})
    devices = {CPU: int(resources.get("CPU", 0))}
    cuda: list[str] = []
    if num_gpus := int(resources.get("GPU", 0)):
        model = next(
            (key.removeprefix("accelerator_type:") for key in resources if key.startswith("accelerator_type:")), ""
        )
        name = class_of(model or labels.get("ray.io/accelerator-type", "") or "GPU")
        devices[name] = num_gpus
        cuda.append(name)
    for key, number in resources.items():
        if key not in KNOWN and ":" not in key and "_group_" not in key and number >= 1:
            devices[key] = int(number)
    return NodeInfo(_name(node), {key: number for key, number in devices.items() if number}, tuple(cuda))


def _name(node: Mapping[str, Any]) -> str:
    """Unique in the cluster, also where several nodes share a machine: its name, else address, with the id's start."""
    return f"{node['NodeManagerAddress']}-{node['NodeID'][:8]}"


def _short(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:3]) or type(error).__name__
