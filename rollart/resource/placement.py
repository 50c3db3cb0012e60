"""Which pools a run has and which workers it wants on which class, from its config and the nodes of its runtime. PURE.

    pools      declared in the config, completed by what the nodes have; or, without any, what the nodes have
    wanted     one entry per worker: its role, class and number of devices
    affinity   task tag -> class, for the router; with "auto" empty, and all classes that generate are compatible

Invariant: what `place` returns can be bound on empty pools, else it raises an error that names the key. What this file
leaves out: what other runs hold (`manager.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import cycle, islice

from msgspec import Struct

from rollart import toml
from rollart.checks import nearest
from rollart.config import ROLES, Config, limits, server_urls
from rollart.errors import ConfigError, ResourceError
from rollart.resource.classes import CLASSES, CPU, ROLE_WANTS, SERVERLESS, Optimised, best_for
from rollart.resource.pool import Pools
from rollart.sections import PoolConfig
from rollart.types import NodeInfo, PoolSpec

CPU_SHARE = 64
"""Workers that share a CPU core by time, unless a pool says otherwise."""

HANDING_OVER = ("embedded", "emulated", "vllm")
"""Engines whose requests can be read on one worker and decoded on another (`protocols.HandsOver`)."""

WORKER_NAMES = {
    "actor_train": "training",
    "actor_gen": "inference",
    "prefill": "prefill",
    "environment": "environment",
    "reward": "reward",
    "rollout": "rollout",
}


Taken = dict[tuple[str, str, int], str]
"""(node, class, index) -> the key of the pool that has the device."""


class Wanted(Struct, frozen=True):
    """One worker to be."""

    worker: str
    role: str
    device_class: str
    num_devices: int = 1


class Placement(Struct, frozen=True):
    """Everything about where a run's workers go."""

    pools: tuple[PoolSpec, ...]
    wanted: tuple[Wanted, ...]
    affinity: dict[str, str]
    fallback: dict[str, tuple[str, ...]]

    def of_role(self, role: str) -> list[Wanted]:
        """The workers of one role."""
        return [each for each in self.wanted if each.role == role]


def place(config: Config, nodes: Sequence[NodeInfo], roles: Iterable[str] = ROLES) -> Placement:
    """Plan a run as it starts. Raises ConfigError, ResourceError."""
    specs = tuple(pool_specs(config.pools, nodes))
    pools = Pools(specs)
    # The widest first: a worker of a whole node finds none once small ones are on every node.
    wanted = sorted((each for role in roles for each in _workers(config, specs, role)), key=lambda it: -it.num_devices)
    for each in wanted:
        _bindable(pools, each)
    if "prefill" in config.roles:
        _check_handing_over(config, specs, [each for each in wanted if each.role in ("actor_gen", "prefill")])
    affinity = dict(config.affinity) if isinstance(config.affinity, dict) else {}
    generating = dict.fromkeys(each.device_class for each in wanted if each.role == "actor_gen")
    _check_affinity(affinity, pools, set(generating))
    if config.engine == "emulated":
        _check_figures(pools, wanted)
    fallback = {name: pools.compatible(name)[1:] for name in pools.classes}
    if config.affinity == "auto":
        fallback = {name: tuple(other for other in generating if other != name) for name in generating}
    return Placement(specs, tuple(wanted), affinity, fallback)


# --------------------------------------------------------------------------------------------------------------- pools
def pool_specs(pools: Mapping[str, PoolConfig], nodes: Sequence[NodeInfo]) -> list[PoolSpec]:
    """The pools that `[pools.*]` declares, completed by what the nodes have. Raises ConfigError."""
    declared: list[PoolSpec] = []
    taken: Taken = {}
    for name, pool in pools.items():
        declared.append(_spec(name, pool, nodes, taken))
    there = {spec.device_class for spec in declared}
    found = [spec for spec in _found(nodes) if not declared or (spec.device_class == CPU and CPU not in there)]
    return declared + found


def _found(nodes: Sequence[NodeInfo]) -> list[PoolSpec]:
    """One pool per class that some node has. A lone accelerator is shared by engine and trainer."""
    classes = dict.fromkeys(name for node in nodes for name in node.devices)
    specs = []
    for name in classes:
        places = {node.name: tuple(range(node.devices[name])) for node in nodes if node.devices.get(name)}
        is_cuda = any(name in node.cuda for node in nodes)
        alone = sum(map(len, places.values())) == 1
        share = CPU_SHARE if name == CPU else 2 if alone else 1
        specs.append(PoolSpec(name, name, places, share=share, device="cuda" if is_cuda else "cpu"))
    return specs


def _spec(name: str, pool: PoolConfig, nodes: Sequence[NodeInfo], taken: Taken) -> PoolSpec:
    """One pool; its devices are added to `taken`."""
    key = f"pools.{toml.key(name)}"
    device_class = SERVERLESS if pool.url else pool.device_class or name
    device = pool.device or ("cpu" if device_class in (CPU, SERVERLESS) else "cuda")
    return PoolSpec(
        name=name,
        device_class=device_class,
        nodes=_nodes(key, pool, device_class, device, nodes, taken),
        share=pool.share or (CPU_SHARE if device_class == CPU else 1),
        cost=pool.cost,
        compatible=tuple(pool.compatible),
        optimised=pool.optimised,
        device=device,
        url=pool.url,
    )


def _nodes(
    key: str, pool: PoolConfig, device_class: str, device: str, nodes: Sequence[NodeInfo], taken: Taken
) -> dict[str, tuple[int, ...]]:
    """Devices per node. What torch calls cuda must be there; a class emulated on the CPU is taken at its word."""
    found = _asked(key, pool, device_class, device, nodes, taken)
    for node, ids in found.items():
        for index in ids:
            owner = taken.setdefault((node, device_class, index), key)
            if owner != key:
                raise ConfigError(f"{key}: {device_class}:{index} of {node} is in {owner} already; keep it in one pool")
    return found


def _asked(
    key: str, pool: PoolConfig, device_class: str, device: str, nodes: Sequence[NodeInfo], taken: Taken
) -> dict[str, tuple[int, ...]]:
    if pool.url:
        return {"serverless": tuple(range(pool.count))}
    known = [node.name for node in nodes]
    if pool.nodes:
        for node in pool.nodes:
            if node not in known:
                raise ConfigError(f"{key}.nodes: no node {node!r}{nearest(node, known)}")
        ids = {node: indices(f"{key}.nodes.{toml.key(node)}", text) for node, text in pool.nodes.items()}
        _check_there(key, device_class, device, [node for node in nodes if node.name in pool.nodes], ids)
        return ids
    if pool.ids:
        ids = {known[0]: indices(f"{key}.ids", pool.ids)}
        _check_there(key, device_class, device, nodes[:1], ids)
        return ids
    offered = {node.name: range(_number(node, device_class, device)) for node in nodes}
    if not any(offered.values()):
        if device == "cuda":
            raise _not_there(key, device_class, nodes)
        offered = {known[0]: range(sum(there == device_class for _, there, _ in taken) + (pool.count or 1))}
    free = {node: [each for each in ids if (node, device_class, each) not in taken] for node, ids in offered.items()}
    return _take(key, pool.count, device_class, free)


def _check_there(
    key: str, device_class: str, device: str, nodes: Sequence[NodeInfo], ids: Mapping[str, tuple[int, ...]]
) -> None:
    """Devices named one by one may be called what their owner likes, but their node must have so many accelerators."""
    if device != "cuda":
        return
    for node in nodes:
        number = _number(node, device_class, device) or sum(node.devices.get(each, 0) for each in node.cuda)
        if not number:
            raise _not_there(key, device_class, [node])
        if ids[node.name][-1] >= number:
            raise ConfigError(
                f"{key}: {node.name} has {number} such devices, 0 to {number - 1}, no {ids[node.name][-1]}"
            )


def _number(node: NodeInfo, device_class: str, device: str) -> int:
    """Devices of a class that a node has. Ray takes a node's word for them, but none is a GPU where it has no GPU."""
    return node.devices.get(device_class, 0) if device != "cuda" or node.cuda else 0


def _not_there(key: str, device_class: str, nodes: Sequence[NodeInfo]) -> ConfigError:
    has = "; ".join(f"{node.name}: {_what(node.devices)}{'' if node.cuda else ', no GPU'}" for node in nodes)
    what = "GPU" if any(node.devices.get(device_class) for node in nodes) else "device"
    return ConfigError(
        f"{key}: no node has a {what} of class {device_class!r} ({has}); to emulate the class on CPU, "
        f'set {key}.device = "cpu"'
    )


def _take(key: str, count: int, device_class: str, free: Mapping[str, Sequence[int]]) -> dict[str, tuple[int, ...]]:
    """The first devices that no other pool has."""
    total = sum(map(len, free.values()))
    if count > total or not total:
        raise ConfigError(
            f"{key}.count: {count or 'all'} devices of class {device_class!r}, but the nodes have {total} "
            "that no other pool has"
        )
    left, found = count or total, {}
    for node, ids in free.items():
        if here := tuple(ids[:left]):
            found[node] = here
            left -= len(here)
    return found


def indices(key: str, text: str) -> tuple[int, ...]:
    """Indices of a text such as "0-3,6".

    >>> indices("", "0-3,6")
    (0, 1, 2, 3, 6)
    """
    found: list[int] = []
    for part in text.replace(" ", "").split(","):
        first, dash, last = part.partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()) or (dash and int(last) < int(first)):
            raise ConfigError(f'{key}: {text!r} are not indices; write them as "0-7" or "0,2,5"')
        found += range(int(first), int(last or first) + 1) if int(last or first) < 1 << 20 else ()
    if len(set(found)) != len(found) or not found:
        raise ConfigError(f"{key}: {text!r} names a device twice, or none")
    return tuple(sorted(found))


def _what(devices: Mapping[str, int]) -> str:
    return ", ".join(f"{number} {name}" for name, number in devices.items()) or "nothing"


# ------------------------------------------------------------------------------------------------------------- workers
def _workers(config: Config, specs: Sequence[PoolSpec], role: str) -> list[Wanted]:
    """The workers of one role: as many per class as its table says, else as the affinity needs, else one.

    Shards are as many as the trajectories need, none when the driver runs them.
    """
    settings = config.roles.get(role)
    if role == "prefill" and settings is None:
        return []
    classes = _classes(config, specs, role)
    asked = settings.workers if settings else 0
    servers = server_urls(config) if role == "actor_gen" else []
    if isinstance(asked, dict):
        names = [name for name, number in asked.items() for _ in range(number)]
        if not names:
            raise ConfigError(
                f"roles.{role}.workers: none at all; give a class a number, such as {{ {classes[0]} = 1 }}, "
                "or leave it out"
            )
    else:
        names = list(islice(cycle(classes), asked or len(servers) or len(classes)))
    if servers and len(names) != len(servers):
        raise ConfigError(
            f"roles.actor_gen.workers: {len(names)}, but engine_options.urls names {len(servers)} servers; each has one"
        )
    if role == "rollout":
        shards = limits(config).shards
        names = classes * shards if shards > 1 else []
    if role == "actor_train" and config.trainer == "embedded" and len(names) != 1:
        raise ConfigError(f"roles.actor_train.workers: {len(names)}, but the embedded trainer is one process; take 1")
    devices = settings.devices if settings else 1
    return [Wanted(f"{WORKER_NAMES[role]}-{number}", role, name, devices) for number, name in enumerate(names)]


def _classes(config: Config, specs: Sequence[PoolSpec], role: str) -> list[str]:
    """The classes that a role should have a worker on."""
    settings = config.roles.get(role)
    known = [spec.device_class for spec in specs]
    if settings and settings.device_class:
        if settings.device_class not in known:
            raise ConfigError(
                f"roles.{role}.device_class: no pool has class {settings.device_class!r}"
                f"{nearest(settings.device_class, known)}"
            )
        return [settings.device_class]
    if role == "actor_gen" and config.affinity == "auto":
        accelerators = [spec.device_class for spec in specs if spec.device_class not in (CPU, SERVERLESS)]
        if accelerators:
            return list(dict.fromkeys(accelerators))
    if role == "actor_gen" and isinstance(config.affinity, dict) and config.affinity:
        return list(dict.fromkeys(config.affinity.values()))
    wish: Optimised = "cpu" if role == "reward" else ROLE_WANTS[role]  # its functions are plain Python
    best = best_for(wish, [(spec.device_class, spec.optimised or None, spec.cost) for spec in specs])  # type: ignore[misc]
    if best is None:
        raise ConfigError(f"roles.{role}: no pool has devices for it; declare one, such as [pools.CPU]")
    return [best]


def _bindable(pools: Pools, wanted: Wanted) -> None:
    key = f"roles.{wanted.role}"
    try:
        pools.bind(f"this config/{wanted.worker}", wanted.role, wanted.device_class, wanted.num_devices)
    except ConfigError as error:
        raise ConfigError(f"{key}: {error}") from error
    except ResourceError as error:
        raise ConfigError(
            f"{key}: worker {wanted.worker}: {error}; ask for fewer workers or devices, or raise the pool's count or "
            "share"
        ) from error


def _check_handing_over(config: Config, specs: Sequence[PoolSpec], wanted: Sequence[Wanted]) -> None:
    """Workers that read and workers that decode must be able to use one another's KV."""
    if config.engine not in HANDING_OVER:
        raise ConfigError(
            f"roles.prefill: engine {config.engine!r} cannot hand KV from one worker to another; leave the table out, "
            f"or take engine {' or '.join(map(repr, HANDING_OVER))}"
        )
    if config.engine != "vllm":
        return
    if config.engine_options.get("enable_prefix_caching") is False:
        raise ConfigError(
            "engine_options.enable_prefix_caching: false, but with roles.prefill workers must keep what they have of a "
            "trajectory; leave it out"
        )
    if len({each.num_devices for each in wanted}) > 1:
        raise ConfigError(
            "roles.prefill.devices: vLLM divides KV among the devices of a worker; take as many as in "
            "roles.actor_gen.devices"
        )
    devices = {spec.device_class: spec.device for spec in specs}
    if len(kinds := {devices[each.device_class] for each in wanted}) > 1:
        raise ConfigError(
            f"roles.prefill.device_class: vLLM's KV on {' and on '.join(sorted(kinds))} differs; put both roles on "
            "classes with the same device"
        )


def _check_figures(pools: Pools, wanted: Iterable[Wanted]) -> None:
    """An emulated engine may stand on a class or on one compatible with it."""
    for each in (each for each in wanted if each.role in ("actor_gen", "prefill")):
        for name in pools.compatible(each.device_class):
            if name not in CLASSES:
                hint = nearest(name, list(CLASSES))
                raise ConfigError(f"engine: 'emulated' has no figures for device class {name!r} of {each.role}{hint}")


def _check_affinity(affinity: Mapping[str, str], pools: Pools, served: set[str]) -> None:
    for tag, name in affinity.items():
        key = f"affinity.{toml.key(tag)}"
        if name not in pools.classes:
            raise ConfigError(f"{key}: no pool has class {name!r}{nearest(name, pools.classes)}")
        if not served & set(pools.compatible(name)):
            raise ConfigError(
                f"{key}: no worker of actor_gen is on class {name!r} or one compatible with it; "
                f"actor_gen is on {', '.join(sorted(served))}"
            )
