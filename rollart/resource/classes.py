"""Device classes by name: what each is good at, so that a role finds its default class among the pools of a run.

Invariant: a class that is not listed still works; it is then "general" unless its pool says `optimised`. Figures: dense
bf16 TFLOPS, memory bandwidth and NVLink, from RollArt (OSDI 2026, section 7) for H20 and H800, else from the makers'
data sheets. What this file leaves out: which devices exist (`devices.py`, `pool.py`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from msgspec import Struct

CPU = "CPU"
SERVERLESS = "serverless"

Optimised = Literal["compute", "bandwidth", "general", "cpu"]


class DeviceClass(Struct, frozen=True):
    """`tflops`: dense bf16; `memory_gb` and `bandwidth_tbs` of its memory; `interconnect_gbs`: to the devices beside it
    in one machine, both directions together as makers state it, 0 where that is not known."""

    name: str
    tflops: float
    memory_gb: float
    bandwidth_tbs: float
    interconnect_gbs: float = 0.0

    @property
    def tflops_per_tbs(self) -> float:
        """Arithmetic intensity at which compute and bandwidth are in balance, FLOP per byte."""
        return self.tflops / self.bandwidth_tbs

    def step_seconds(self, num_tokens: int, params: float) -> float:
        """Seconds at least (roofline) of a step of a bf16 model that computes `num_tokens`, read or generated.

        max(2 x params x tokens / FLOPS, 2 bytes x params / bandwidth); attention is left out.

        >>> [f"{CLASSES[name].step_seconds(1000, 8.2e9):.4f}" for name in ("H800", "H20")]
        ['0.0166', '0.1108']
        """
        return 2 * params * max(num_tokens / (self.tflops * 1e12), 1 / (self.bandwidth_tbs * 1e12))


CLASSES = {
    each.name: each
    for each in (
        DeviceClass("H20", 148, 96, 4.0, 900),
        DeviceClass("H800", 989.5, 80, 3.35, 400),
        DeviceClass("H100", 989.5, 80, 3.35, 900),
        DeviceClass("H200", 989.5, 141, 4.8, 900),
        DeviceClass("A100", 312, 80, 2.04, 600),
        DeviceClass("A800", 312, 80, 2.04, 400),
        DeviceClass("L40S", 362, 48, 0.864),
        DeviceClass("L20", 119.5, 48, 0.864),
        DeviceClass("B200", 2250, 180, 8.0, 1800),
    )
}

ROLE_WANTS: dict[str, Optimised] = {
    "actor_train": "compute",
    "actor_gen": "bandwidth",
    "prefill": "compute",
    "environment": "cpu",
    "reward": "general",
    "rollout": "cpu",
}
"""What a role wants when nothing is declared (paper section 3). "general": a local accelerator, the cheapest."""


def class_of(model: str) -> str:
    """The class of a device by its maker's model name: "NVIDIA H100 80GB HBM3" is an H100.

    >>> class_of("NVIDIA H800 PCIe"), class_of("NVIDIA GeForce RTX 4090")
    ('H800', 'GeForce RTX 4090')
    """
    words = model.replace("-", " ").split()
    known = next((word for word in words if word in CLASSES), None)
    return known or model.removeprefix("NVIDIA ").strip() or "NVIDIA"


def best_for(wanted: Optimised, classes: Iterable[tuple[str, Optimised | None, float]]) -> str | None:
    """The class that suits a wish, among (name, what its pool says it is optimised for, cost); None when there is none.

    "cpu" takes a CPU class. The others take accelerators where there are any: first those whose pool says so, then by
    figures (most TFLOPS for "compute", least TFLOPS per TB/s for "bandwidth", least cost for "general").
    """
    there = [each for each in classes if each[0] != SERVERLESS]
    accelerators = [each for each in there if each[0] != CPU]
    if wanted == "cpu":
        there = [each for each in there if each[0] == CPU or each[1] == "cpu"] or there
    else:
        there = accelerators or there
    if not there:
        return None
    said = [each for each in there if each[1] == wanted]
    return min(said or there, key=lambda each: _rank(wanted, *each))[0]


def _rank(wanted: Optimised, name: str, _: Optimised | None, cost: float) -> tuple[bool, float, str]:
    """Less is better; a class without figures comes after those that have them."""
    known = CLASSES.get(name)
    if wanted == "compute":
        return known is None, -known.tflops if known else cost, name
    if wanted == "bandwidth":
        return known is None, known.tflops_per_tbs if known else cost, name
    return False, cost, name
