"""Distributions of what was measured. PURE.

Invariant: what is fitted has the mean of the sample; where all values are equal it is constant. Waiting times are taken
for lognormal, as a sample knows little of its tail; lengths, which have limits, come as they were.
What this file leaves out: whatever ties two quantities of one trajectory together.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import accumulate
from statistics import fmean, stdev

from rollart.data.simulated.profile import NOTHING, Spread

MOST_VALUES = 64
NIL = 1e-3
"""A standard deviation below this share of the mean is none."""


def fitted(values: Sequence[float], bounded: bool = False) -> Spread:
    """A lognormal with the mean and the variance of `values`; a constant where they do not differ; nothing of nothing.

    bounded: as for lengths, whose limits the sample has met: at most MOST_VALUES that stand for equal parts of it.
    """
    if not values:
        return NOTHING
    mean = fmean(values)
    deviation = stdev(values) if len(values) > 1 else 0.0
    if deviation <= NIL * mean:
        return Spread(rounded(mean))
    if bounded:
        return Spread(rounded(mean), "recorded", values=tuple(map(rounded, _parts(sorted(values)))))
    sigma = math.sqrt(math.log1p((deviation / mean) ** 2))
    return Spread(rounded(mean), "lognormal", rounded(sigma))


def _parts(ordered: Sequence[float]) -> list[float]:
    """The means of equal parts of a sorted sample; where a part ends within a value, it has so much of it."""
    count = min(MOST_VALUES, len(ordered))
    until = [0.0, *accumulate(ordered)]

    def total(place: float) -> float:
        whole = min(int(place), len(ordered) - 1)
        return until[whole] + (place - whole) * ordered[whole]

    size = len(ordered) / count
    return [(total((part + 1) * size) - total(part * size)) / size for part in range(count)]


def shared_part(groups: Mapping[str, Sequence[float]]) -> float:
    """Share of the variance of the logarithms that lies between groups: the intra-class correlation of a one-way
    analysis of variance (Fisher 1925), 0 to 1. 0 where fewer than two groups have two members.
    """
    logs = [[math.log(value) for value in values] for values in groups.values() if len(values) > 1]
    total = sum(map(len, logs))
    if len(logs) < 2:
        return 0.0
    grand = fmean([value for values in logs for value in values])
    between = sum(len(values) * (fmean(values) - grand) ** 2 for values in logs) / (len(logs) - 1)
    within = sum((value - fmean(values)) ** 2 for values in logs for value in values) / (total - len(logs))
    size = (total - sum(len(values) ** 2 for values in logs) / total) / (len(logs) - 1)
    shared = max(0.0, (between - within) / size)
    return shared / (shared + within) if shared else 0.0


def rounded(value: float) -> float:
    """Four significant digits, which is more than any sample knows."""
    return float(f"{value:.4g}")
