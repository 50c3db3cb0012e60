"""What a Ray cluster's nodes are to us: names, device classes, what a binding takes of a node. PURE: imports no Ray.

A node's classes: its GPUs, by their model; its custom resources, by their name; its CPU cores. A node with the label
`rollart.class` has all its GPUs, or without any its cores, in that class. Invariant: two raylets never have one name,
also where they share a machine, and a name never changes while the `NodeNames` lives.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from rollart.resource.classes import CPU, class_of
from rollart.types import Binding, NodeInfo

CLASS_LABEL = "rollart.class"
ACCELERATOR = "accelerator_type:"
HEAD = "node:__internal_head__"
"""A resource that only the head node has."""
NOT_DEVICES = frozenset({"CPU", "GPU", "memory", "object_store_memory"})

RayNode = Mapping[str, Any]
"""One entry of `ray.nodes()`."""


class NodeNames:
    """Names by Ray's node id: the name or address that Ray has, followed by the id where several raylets share it."""

    def __init__(self) -> None:
        self._names: dict[str, str] = {}

    def of(self, nodes: Iterable[RayNode]) -> dict[str, RayNode]:
        """The living nodes by name: the head first, then by name, so that every driver sees them in one order."""
        alive = [node for node in nodes if node["Alive"]]
        shared = Counter(map(_plain, alive))
        for node in alive:
            if node["NodeID"] not in self._names:
                name = _plain(node)
                alone = shared[name] == 1 and name not in self._names.values()
                self._names[node["NodeID"]] = name if alone else f"{name}-{node['NodeID'][:8]}"
        named = {self._names[node["NodeID"]]: node for node in alive}
        return dict(sorted(named.items(), key=lambda item: (HEAD not in item[1]["Resources"], item[0])))


def node_info(name: str, node: RayNode) -> NodeInfo:
    """What a node has."""
    resources, said = node["Resources"], node.get("Labels", {}).get(CLASS_LABEL, "")
    num_gpus, num_cores = int(resources.get("GPU", 0)), int(resources.get("CPU", 0))
    devices = {said if said and not num_gpus else CPU: num_cores}
    cuda: list[str] = []
    if num_gpus:
        model = next((key.removeprefix(ACCELERATOR) for key in resources if key.startswith(ACCELERATOR)), "GPU")
        cuda.append(said or class_of(model))
        devices[cuda[0]] = num_gpus
    devices |= {key: int(number) for key, number in resources.items() if _is_custom(key)}
    there = {key: number for key, number in devices.items() if number}
    return NodeInfo(name, there, tuple(cuda), address=node.get("NodeManagerAddress", ""))


def bundle_of(binding: Binding, node: RayNode) -> dict[str, float]:
    """What a binding takes of Ray's accounting; nothing for cores, which ours counts."""
    taken: dict[str, float] = {}
    if binding.device == "cuda":
        taken["GPU"] = _amount(binding)
    if binding.device_class in node["Resources"] and _is_custom(binding.device_class):
        taken[binding.device_class] = _amount(binding)
    return taken


def shortage(bundle: Mapping[str, float], node: RayNode) -> str:
    """What a node could not give even if nobody held anything of it; nothing where it could."""
    has = {key: float(node["Resources"].get(key, 0)) for key in bundle}
    return ", ".join(f"{has[key]:g} {key}, not {asked:g}" for key, asked in bundle.items() if asked > has[key])


def _amount(binding: Binding) -> float:
    """Ray takes parts of one device, or whole ones."""
    number = len(binding.devices) / binding.share
    return number if number < 1 else float(math.ceil(number))


def _is_custom(resource: str) -> bool:
    return resource not in NOT_DEVICES and ":" not in resource and "_group_" not in resource


def _plain(node: RayNode) -> str:
    return str(node.get("NodeName") or node["NodeManagerAddress"])
