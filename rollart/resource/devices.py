"""What this machine has, and whether the devices of a config are among it; without importing torch.

Invariant: `check` refuses only what cannot be there. What this file leaves out: whether the installed torch was built
for the device, which the worker that uses it says.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from pathlib import Path

from msgspec import Struct

from rollart.checks import nearest
from rollart.config import Config
from rollart.errors import ConfigError

ROOT = Path("/")


class Machine(Struct, frozen=True):
    """The devices that this process may use. `cuda`: one name per device, in the order of its index."""

    num_cores: int
    cuda: tuple[str, ...] = ()

    def __str__(self) -> str:
        cores = f"cpu ({self.num_cores} core{'s' if self.num_cores != 1 else ''})"
        return ", ".join([cores, *(f"cuda:{index} ({name})" for index, name in enumerate(self.cuda))])


def detect(root: Path = ROOT, environ: Mapping[str, str] = os.environ) -> Machine:
    """Look at the affinity mask, the CPU quota of the cgroup, and the NVIDIA driver's files under `root`."""
    cores = min(float(len(os.sched_getaffinity(0))), _cpu_quota(root))
    return Machine(max(1, math.floor(cores)), _visible(_cuda_names(root), environ.get("CUDA_VISIBLE_DEVICES")))


def check(config: Config, machine: Machine | None = None) -> Machine:
    """The machine, if it has `rollout.device` and `train.device`. Raises ConfigError."""
    machine = machine or detect()
    for key, device in (("rollout.device", config.rollout.device), ("train.device", config.train.device)):
        kind = re.fullmatch(r"cpu|cuda(?::(\d+))?", device)
        if not kind:
            raise ConfigError(f"{key}: {device!r} is not a device{nearest(device, ['cpu', 'cuda', 'cuda:0'])}")
        if device != "cpu" and int(kind[1] or 0) >= len(machine.cuda):
            raise ConfigError(f"{key}: {device!r}: no such device on this machine; it has: {machine}")
    return machine


def _cuda_names(root: Path) -> list[str]:
    """Device files come first: a container may see the driver's list of the whole host."""
    files = [path for path in (root / "dev").glob("nvidia*") if re.fullmatch(r"nvidia\d+", path.name)]
    listed = sorted((root / "proc/driver/nvidia/gpus").glob("*/information"))
    models = [_model(path) for path in listed]
    if not files:
        return models or (["through WSL"] if (root / "dev/dxg").exists() else [])
    return models if len(models) == len(files) else ["NVIDIA"] * len(files)


def _model(information: Path) -> str:
    match = re.search(r"^Model:\s*(.+)$", _read(information), re.MULTILINE)
    return match[1].strip() if match else "NVIDIA"


def _visible(names: list[str], chosen: str | None) -> tuple[str, ...]:
    """What CUDA_VISIBLE_DEVICES leaves: a list of indices or ids, which ends at the first that is not valid."""
    if chosen is None:
        return tuple(names)
    visible = []
    for entry in filter(None, (part.strip() for part in chosen.split(","))):
        if entry.lstrip("-").isdigit() and not 0 <= int(entry) < len(names):
            break
        visible.append(names[int(entry)] if entry.isdigit() else "NVIDIA")
    return tuple(visible[: len(names)])


def _cpu_quota(root: Path) -> float:
    """Cores that the cgroup and those above it allow; infinite without a quota."""
    folders = [root / "sys/fs/cgroup", root / "sys/fs/cgroup/cpu"]
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, _, inner = line.partition("::" if line.startswith("0::") else ":cpu")
        parts = Path(inner[inner.find("/") + 1 :]).parts if "/" in inner else ()
        base = folders[0] if line.startswith("0::") else folders[1]
        folders += [base.joinpath(*parts[: depth + 1]) for depth in range(len(parts))]
    return min((_quota(folder) for folder in folders), default=math.inf)


def _quota(folder: Path) -> float:
    words = _read(folder / "cpu.max").split() or [
        _read(folder / "cpu.cfs_quota_us").strip(),
        _read(folder / "cpu.cfs_period_us").strip(),
    ]
    if not all(word.isdigit() for word in words) or len(words) != 2 or not int(words[1]):
        return math.inf
    return int(words[0]) / int(words[1])


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
