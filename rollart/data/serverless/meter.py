"""What the calls of one function took and cost. Pure, and mergeable over the workers that call it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec
from msgspec import Struct, field

BOUNDS_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
"""Upper bounds of the latency histogram's buckets; one more holds what took longer."""


class Usage(Struct):
    """Counters since the start. Seconds are of calls, added up."""

    calls: int = 0
    results: int = 0
    tries: int = 0
    """Deliveries to the endpoint; more than calls where some were repeated or hedged."""
    hedged: int = 0
    """Second deliveries of stragglers."""
    fallbacks: int = 0
    """Calls that the fallback answered."""
    repeated: int = 0
    """Calls whose key was known already: answered without another delivery."""
    cold_starts: int = 0
    failures: dict[str, int] = field(default_factory=dict)
    """Failed tries and calls by cause: raised, timeout, endpoint, refused, payload, reply."""
    processes: int = 0
    """Alive at this moment."""
    allocated_s: float = 0.0
    """Seconds that processes existed; where somebody else's machines do the work: what is billed."""
    busy_s: float = 0.0
    billed_s: float = 0.0
    queue_s: float = 0.0
    """Waiting for a place at the endpoint."""
    cost: float = 0.0
    """By the prices in the config."""
    trouble: str = ""
    """Why the endpoint is left alone at this moment; empty while calls go through."""
    latency: list[int] = field(default_factory=lambda: [0] * (len(BOUNDS_S) + 1))
    """Answered tries per bucket of `BOUNDS_S`."""

    @property
    def utilisation(self) -> float:
        """Share of the allocated seconds that did work."""
        return self.busy_s / self.allocated_s if self.allocated_s else 0.0

    def facts(self) -> dict[str, Any]:
        """All of it as plain values, with the figures that follow; what summary.json holds."""
        plain: dict[str, Any] = msgspec.to_builtins(self)
        plain["latency"] = {
            **{f"<= {bound:g} s": count for bound, count in zip(BOUNDS_S, self.latency, strict=False) if count},
            **({f"> {BOUNDS_S[-1]:g} s": self.latency[-1]} if self.latency[-1] else {}),
        }
        return plain | {
            "utilisation": self.utilisation,
            "latency_p50_s": self.quantile(0.5),
            "latency_p95_s": self.quantile(0.95),
        }

    def failed(self, cause: str) -> None:
        """Count a failure."""
        self.failures[cause] = self.failures.get(cause, 0) + 1

    def answered(self, latency_s: float) -> None:
        """Count an answered try in the histogram."""
        self.latency[sum(latency_s > bound for bound in BOUNDS_S)] += 1

    def quantile(self, share: float) -> float | None:
        """Upper bound in seconds of the bucket that holds this share of the tries; None without any, or beyond all."""
        total, seen = sum(self.latency), 0
        for bound, count in zip(BOUNDS_S, self.latency, strict=False):
            seen += count
            if total and seen >= share * total:
                return bound
        return None


def merged(parts: Iterable[Usage]) -> Usage:
    """The sum of several callers' counters."""
    total = Usage()
    for part in parts:
        for name in Usage.__struct_fields__:
            mine, theirs = getattr(total, name), getattr(part, name)
            if isinstance(mine, dict):
                for cause, count in theirs.items():
                    mine[cause] = mine.get(cause, 0) + count
            elif isinstance(mine, str):
                setattr(total, name, mine or theirs)
            elif isinstance(mine, list):
                mine[:] = [a + b for a, b in zip(mine, theirs, strict=True)]
            else:
                setattr(total, name, mine + theirs)
    return total
