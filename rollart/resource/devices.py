"""What this machine has, without importing torch, and what a process must be told to see its own devices alone.

Invariant: nothing is left out that could be there. What this file leaves out: whether the installed torch was built
for the device, which the worker that uses it says.
"""

from __future__ import annotations

import math
import os
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from msgspec import Struct

from rollart.resource.classes import CPU, class_of
from rollart.types import Binding, NodeInfo

LOCALHOST = "localhost"
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


def this_node(machine: Machine | None = None) -> NodeInfo:
    """This machine as a node of a runtime: its cores, and its CUDA devices by class."""
    machine = machine or detect()
    models = Counter(map(class_of, machine.cuda))
    return NodeInfo(LOCALHOST, {CPU: machine.num_cores, **models}, tuple(models))


def environment_of(binding: Binding | None, environ: Mapping[str, str], root: Path = ROOT) -> dict[str, str]:
    """What a process must find in its environment to see the devices of its binding and no others.

    Devices are counted within the class, as CUDA_VISIBLE_DEVICES of this process has left them.
    """
    if binding is None:
        return {}
    if binding.device != "cuda":
        return {"CUDA_VISIBLE_DEVICES": ""}
    listed = [each.strip() for each in environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if each.strip()]
    classes = [class_of(model) for model in detect(root, environ).cuda]
    places = [place for place, name in enumerate(classes) if name == binding.device_class] or list(range(len(classes)))
    chosen = [places[index] if index < len(places) else index for index in binding.devices]
    return {"CUDA_VISIBLE_DEVICES": ",".join(listed[each] if each < len(listed) else str(each) for each in chosen)}


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
