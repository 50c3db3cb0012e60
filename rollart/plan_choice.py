"""What a plan decides, as one value: read from a config, written into one, and compared in words. PURE.

Invariant: `configured(config, given(config), choice)` makes a config whose own choice is `choice`, or raises
ConfigError. What this file leaves out: which choices there are (`plan_space.py`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any, Literal

from msgspec import Struct
from msgspec.structs import replace

from rollart import toml
from rollart.config import Config, from_dict, to_dict
from rollart.errors import ConfigError
from rollart.resource.classes import CPU
from rollart.resource.placement import place
from rollart.schedule import SCHEDULES
from rollart.sections import SimulateConfig
from rollart.types import NodeInfo

AUTO: Literal["auto"] = "auto"
STEPS = 12
"""A pool changes by about this part of it, at most by a node."""

Affinity = tuple[tuple[str, str], ...] | Literal["auto"]
Counts = tuple[tuple[str, int], ...]


class Trainer(Struct, frozen=True):
    """`workers` on one class, of `devices` each."""

    device_class: str
    workers: int
    devices: int

    @property
    def total(self) -> int:
        """Devices in all."""
        return self.workers * self.devices


class Choice(Struct, frozen=True, kw_only=True):
    """A plan. `devices` and `engines`: per device class; `alpha`: None where the schedule implies it.

    affinity: (tag, class) pairs in order, `auto`, or (). extra_groups: a number, or `auto` (`control/pacing.py`).
    prefill: the class that only prefills, or "".
    """

    schedule: str
    alpha: float | None
    devices: Counts
    trainer: Trainer
    engines: Counts
    tensor_parallel: int
    prefill: str
    affinity: Affinity
    extra_groups: int | Literal["auto"]
    extra_members: int
    on_target: Literal["abort", "keep"]
    free_slots: Literal["train_end", "train_start"]
    engine_slots: int

    @property
    def bound(self) -> float:
        """The alpha in force."""
        implied = SCHEDULES[self.schedule].alpha
        if implied is not None:
            return implied
        return 1.0 if self.alpha is None else self.alpha

    def kinds(self, other: Choice) -> set[str]:
        """In what it differs; the mix and the split of devices are one, engines follow from others."""
        differing = {name for name in self.__struct_fields__ if getattr(self, name) != getattr(other, name)}
        return {"devices" if name == "trainer" else name for name in differing - {"engines"}}


class Pool(Struct, frozen=True):
    """The pool of a device class. `reserved`: devices of roles that plans leave alone; `step`: devices per change."""

    name: str
    device_class: str
    count: int
    cost: float
    share: int
    reserved: int
    step: int


def pools(config: Config) -> list[Pool]:
    """The pools of accelerators, one per class. Raises ConfigError where one cannot be varied."""
    found: dict[str, Pool] = {}
    for name, pool in config.pools.items():
        device_class = pool.device_class or name
        if pool.url or device_class == CPU or pool.optimised == "cpu":
            continue
        key = f"pools.{toml.key(name)}"
        if device_class in found:
            raise ConfigError(
                f"{key}: pool {found[device_class].name!r} has class {device_class!r} too; a plan varies the devices "
                "of a class, so join them in one pool"
            )
        if not pool.count:
            raise ConfigError(f"{key}.count: a plan varies the number of devices; say how many there are now")
        step = min(node_size(config), 1 << max(0, (pool.count // STEPS).bit_length() - 1))
        reserved = _reserved(config, device_class)
        found[device_class] = Pool(name, device_class, pool.count, pool.cost, pool.share or 1, reserved, step)
    if not found:
        raise ConfigError("pools: a plan needs pools of accelerators; declare them, such as [pools.H800]")
    return list(found.values())


def node_size(config: Config) -> int:
    """Devices of a node, which a worker of several devices cannot exceed."""
    return (config.simulate or SimulateConfig()).devices_per_node


def given(config: Config) -> Choice:
    """The choice that a config makes. Raises ConfigError, ResourceError."""
    if "prefill" in config.roles:
        raise ConfigError("roles.prefill: a plan says who reads by simulate.prefill; set that, and leave the table out")
    devices = {pool.device_class: pool.count for pool in pools(config)}
    node = NodeInfo("planned", {CPU: 1, **devices}, cuda=tuple(devices))
    # Any number of training workers: here they are a matter of devices alone.
    placed = place(replace(config, trainer="simulated"), [node], roles=("actor_train", "actor_gen"))
    training, generating = placed.of_role("actor_train"), placed.of_role("actor_gen")
    rollout = config.rollout
    return Choice(
        schedule=config.schedule,
        alpha=None if config.plan.alpha is not None else config.effective_alpha,
        devices=tuple(devices.items()),
        trainer=Trainer(training[0].device_class, len(training), training[0].num_devices),
        engines=tuple(Counter(each.device_class for each in generating).items()),
        tensor_parallel=generating[0].num_devices,
        prefill=config.simulate.prefill if config.simulate else "",
        affinity=tuple(sorted(config.affinity.items())) if isinstance(config.affinity, dict) else AUTO,
        extra_groups=rollout.extra_groups,
        extra_members=rollout.extra_members,
        on_target=rollout.on_target,
        free_slots=rollout.free_slots,
        engine_slots=rollout.engine_slots,
    )


def configured(config: Config, before: Choice, after: Choice) -> Config:
    """The config with `after` in place of `before`, which is its own; itself when both are equal.

    Raises ConfigError.
    """
    if before == after:
        return config
    data = to_dict(config)
    _set_pools(data, {pool.name: dict(after.devices).get(pool.device_class, 0) for pool in pools(config)})
    trainer = after.trainer
    data["roles"] |= {
        "actor_train": {
            "device_class": trainer.device_class,
            "workers": trainer.workers,
            "devices": trainer.devices,
        },
        "actor_gen": {"workers": dict(after.engines), "devices": after.tensor_parallel},
    }
    for name in ("extra_groups", "extra_members", "on_target", "free_slots", "engine_slots"):
        data["rollout"][name] = getattr(after, name)
    data["schedule"] = after.schedule
    data["affinity"] = AUTO if after.affinity == AUTO else dict(after.affinity)
    data.setdefault("simulate", {})["prefill"] = after.prefill
    data.pop("alpha", None)
    if after.alpha is not None:
        data["alpha"] = after.alpha
    return from_dict(data)


def _set_pools(data: dict[str, Any], counts: Mapping[str, int]) -> None:
    """New numbers of devices; a pool without any is left out, and nobody falls back to its class."""
    tables = data["pools"]
    gone = [tables[name].get("device_class") or name for name, count in counts.items() if not count]
    for name, count in counts.items():
        tables[name]["count"] = count
    data["pools"] = {name: table for name, table in tables.items() if counts.get(name, 1)}
    for table in data["pools"].values():
        table["compatible"] = [name for name in table.get("compatible", []) if name not in gone]


def _reserved(config: Config, device_class: str) -> int:
    """Devices of a class that other roles than training and generation hold."""
    held = 0
    for name, role in config.roles.items():
        if name in ("actor_train", "actor_gen"):
            continue
        if isinstance(role.workers, Mapping):
            held += role.devices * role.workers.get(device_class, 0)
        elif role.device_class == device_class:
            held += role.devices * max(1, role.workers)
    return held


# ------------------------------------------------------------------------------------------------------------ in words
def changes(before: Choice, after: Choice) -> list[str]:
    """What differs, one phrase each."""
    found = [
        _changed("devices", _counts(before.devices), _counts(after.devices)),
        _changed("training on", _training(before), _training(after)),
        _changed("engines", _counts(before.engines), _counts(after.engines)),
        _changed("devices per engine", str(before.tensor_parallel), str(after.tensor_parallel)),
        _changed("schedule", before.schedule, after.schedule),
        _changed("alpha", f"{before.bound:g}", f"{after.bound:g}"),
        _changed("affinity", _affinity(before.affinity), _affinity(after.affinity)),
        _changed("only prefill on", before.prefill or "no class", after.prefill or "no class"),
        _changed("extra groups", str(before.extra_groups), str(after.extra_groups)),
        _changed("extra members", str(before.extra_members), str(after.extra_members)),
        _changed("surplus groups", before.on_target, after.on_target),
        _changed("slots freed at", _moment(before), _moment(after)),
        _changed("engine slots", str(before.engine_slots), str(after.engine_slots)),
    ]
    return [each for each in found if each]


def _changed(what: str, before: str, after: str) -> str:
    return "" if before == after else f"{what}: {before} -> {after}"


def _counts(counts: Counts) -> str:
    return " + ".join(f"{number} {name}" for name, number in counts)


def _training(choice: Choice) -> str:
    return f"{choice.trainer.total} {choice.trainer.device_class}"


def _moment(choice: Choice) -> str:
    return "the start of training" if choice.free_slots == "train_start" else "its end"


def _affinity(affinity: Affinity) -> str:
    if affinity == AUTO:
        return "by measurement"
    return ", ".join(f"{tag} to {name}" for tag, name in affinity) or "none"
