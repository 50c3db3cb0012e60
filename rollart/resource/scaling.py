"""How many environment workers a run needs, decided by what their calls cost. PURE: measurements in, a verdict out.

A worker is one Python process, so it gives at most one core to its environments, however many threads it has. Workers
are the bottleneck when they use about a core each while engines stand idle for trajectories that are being reset or
stepped. Then more of them help, as long as cores are free. The number only grows, so it cannot oscillate: at most it
doubles, and the next verdict is on what was measured afterwards.

Invariant: `add` is at most the cores that are free. What this file leaves out: measuring, and starting workers
(`rollart/scaling.py`); environments that wait instead of compute, for which `rollout.env_threads` is the key.
"""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

SATURATED = 0.8
"""Cores that a worker uses on average from which it is at its limit."""
IDLE = 0.1
"""Share of the time that engines stand still from which somebody keeps them waiting."""
SHARE = 0.2
"""Share of the trajectories in reset or step from which that somebody is the environments."""


class EnvironmentLoad(Struct, frozen=True):
    """What was measured of all environment workers together over `seconds`.

    `cores`: CPU seconds of their processes per second; `calls` and `call_cpu_s`: resets and steps that ended, and CPU
    seconds inside them; `engine_idle`: share of the time that engines had nothing to do, the mean over engines;
    `in_environment`: share of the running trajectories that were in reset or step.
    """

    seconds: float
    workers: int
    cores: float
    calls: int
    call_cpu_s: float
    engine_idle: float
    in_environment: float

    def __str__(self) -> str:
        cost_ms = 1000 * self.call_cpu_s / self.calls if self.calls else 0.0
        return (
            f"a call costs {cost_ms:.2g} ms of CPU, {self.calls / self.seconds:.0f} calls/s use {self.cores:.1f} cores "
            f"of {self.workers} worker{'s' if self.workers != 1 else ''}, engines are idle {self.engine_idle:.0%} of "
            f"the time, {self.in_environment:.0%} of the trajectories are in their environments"
        )


class Verdict(Struct, frozen=True):
    """`kind`: "enough"; "grow" by `add`; or "full", when more would help but no core is free."""

    kind: Literal["enough", "grow", "full"]
    add: int
    why: str


def decide(load: EnvironmentLoad, free_cores: int) -> Verdict:
    """Whether the workers that made this load are enough.

    >>> busy = EnvironmentLoad(5.0, 2, 1.9, 400, 9.0, engine_idle=0.5, in_environment=0.9)
    >>> decide(busy, free_cores=6).add, decide(busy, free_cores=1).add, decide(busy, free_cores=-1).kind
    (2, 1, 'full')
    """
    saturated = load.workers > 0 and load.cores >= SATURATED * load.workers
    awaited = load.engine_idle >= IDLE and load.in_environment >= SHARE
    if not (saturated and awaited):
        return Verdict("enough", 0, f"environment workers: {load.workers} are enough: {load}")
    if free_cores < 1:
        return Verdict("full", 0, f"environment workers: {load.workers}, as no core is free for more: {load}")
    add = min(load.workers, free_cores)
    return Verdict("grow", add, f"environment workers: {load.workers} -> {load.workers + add}: {load}")
