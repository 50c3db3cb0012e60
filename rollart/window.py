"""The last seconds of a run as rates and shares: what lies between two samples of its counters. PURE.

Invariant: the engines' waits add up to the seconds in which the mean engine was not busy, wherever a cause is known.
What this file leaves out: taking samples (`observer.py`) and showing what comes out (`console.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec import Struct

HELD = ("suspended", "weights")
"""Waits of the trainer during which engines may be held up for new weights."""


class Sample(Struct, frozen=True):
    """Counters at one moment.

    `busy_s`: of the mean engine; `no_engine_s`: without any; `stages`: seconds times trajectories.
    """

    at: float
    generated: int
    trajectories: int
    busy_s: float
    train_s: float
    waits_s: dict[str, float]
    stages: dict[str, float]
    no_engine_s: float = 0.0


def window(first: Sample, last: Sample) -> dict[str, Any]:
    """Fields of a `Status`."""
    seconds = last.at - first.at
    waits = _difference(first.waits_s, last.waits_s)
    stages = _difference(first.stages, last.stages)
    engine_waits = _engine_waits(first, last, stages, waits)
    stages.pop("training", None)
    return {
        # Less than nothing: an engine was started again, and counts from 0.
        "tokens_per_s": max(0, last.generated - first.generated) / seconds,
        "trajectories_per_s": (last.trajectories - first.trajectories) / seconds,
        "stages": stages,
        "train_s": last.train_s - first.train_s,
        "trainer_waits": {cause: waited for cause, waited in waits.items() if cause != "training" and waited > 0},
        "engine_waits": engine_waits,
        "window_s": seconds,
    }


def _engine_waits(
    first: Sample, last: Sample, stages: Mapping[str, float], waits: Mapping[str, float]
) -> dict[str, float]:
    """Idle engine time goes to where trajectories were meanwhile; where all of them generate, to new weights."""
    seconds, gone_s = last.at - first.at, last.no_engine_s - first.no_engine_s
    busy_s = max(0.0, last.busy_s - first.busy_s)  # an engine that was started again counts from 0
    idle_s = max(0.0, seconds - gone_s - busy_s)
    causes = {stage: part for stage, part in stages.items() if stage != "generate" and part > 0}
    causes = causes or {cause: waits[cause] for cause in HELD if waits.get(cause, 0.0) > 0}
    total = sum(causes.values())
    found = {cause: idle_s * part / total for cause, part in causes.items()}
    return found | ({"no_engine": gone_s} if gone_s > 0 else {})


def _difference(first: Mapping[str, float], last: Mapping[str, float]) -> dict[str, float]:
    return {key: value - first.get(key, 0.0) for key, value in last.items()}
