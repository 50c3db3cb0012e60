"""Distributions of what was measured. PURE.

Invariant: what is fitted has the mean of the sample, also after its bounds; where all values are equal it is constant.
What this file leaves out: other shapes than the lognormal, which suits waiting times and lengths with a long tail, and
whatever ties two quantities of one trajectory together.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import NormalDist, fmean, stdev

from rollart.data.simulated.profile import NOTHING, Spread

NORMAL = NormalDist()
NIL = 1e-3
"""A standard deviation below this share of the mean is none."""


def fitted(values: Sequence[float], bounded: bool = False) -> Spread:
    """A lognormal with the mean and the variance of `values`; a constant where they do not differ; nothing of nothing.

    bounded: keep within the smallest and the largest value, as for lengths, whose limits the sample has met; the mean
    is then moved so that draws keep that of the sample.
    """
    if not values:
        return NOTHING
    mean = fmean(values)
    deviation = stdev(values) if len(values) > 1 else 0.0
    if deviation <= NIL * mean:
        return Spread(rounded(mean))
    sigma = math.sqrt(math.log1p((deviation / mean) ** 2))
    if not bounded:
        return Spread(rounded(mean), "lognormal", rounded(sigma))
    low, high = min(values), max(values)
    return Spread(rounded(_moved(mean, sigma, low, high)), "lognormal", rounded(sigma), low, high)


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


def _moved(mean: float, sigma: float, low: float, high: float) -> float:
    """The mean of the lognormal that has `mean` between its bounds, by bisection: the latter grows with the former."""
    below, above = mean / 1e3, mean * 1e3
    for _ in range(60):
        middle = math.sqrt(below * above)
        if _bounded_mean(middle, sigma, low, high) < mean:
            below = middle
        else:
            above = middle
    return middle


def _bounded_mean(mean: float, sigma: float, low: float, high: float) -> float:
    """Of a lognormal whose values below `low` and above `high` are moved there (partial expectations)."""
    centre = math.log(mean) - sigma * sigma / 2
    first = (math.log(low) - centre) / sigma if low > 0 else -math.inf
    last = (math.log(high) - centre) / sigma
    inside = mean * (_below(last - sigma) - _below(first - sigma))
    return low * _below(first) + inside + high * (1 - _below(last))


def _below(deviations: float) -> float:
    return NORMAL.cdf(deviations)
