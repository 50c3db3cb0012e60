"""How far from their peaks devices work, and what links between them carry.

What this file leaves out: what follows from it (`device.py`, `store.py`).
"""

from __future__ import annotations

from msgspec import field

from rollart.sections import Count, Fraction, NonNegative, Positive, Section


class Efficiency(Section, frozen=True, kw_only=True):
    """Shares of the peaks, and what engines and the trainer cost beside them."""

    prefill: Fraction = 0.5
    """Share of peak FLOPS."""
    decode: Fraction = 0.7
    """Share of memory bandwidth."""
    train: Fraction = 0.3
    """Share of peak FLOPS, log-probability passes included."""
    step_overhead_s: NonNegative = 0.004
    """Host time of an engine step."""
    tp_efficiency: Fraction = 0.9
    """What each doubling of the devices of one engine leaves of their sum."""
    memory: Fraction = 0.9
    """Share of memory for weights and KV."""
    chunk_tokens: Count = 8192
    """Prompt tokens of one engine step."""
    slots_max: Count = 256
    """Requests that one engine runs at once."""
    train_overhead_s: NonNegative = 2.0
    """Of a train_step, whatever its size."""
    reasons: dict[str, str] = field(default_factory=dict)


class Link(Section, frozen=True, kw_only=True):
    """A way for bytes."""

    latency_s: NonNegative = 0.0
    bytes_per_s: Positive = 25e9

    def seconds(self, num_bytes: float) -> float:
        """Of one transfer."""
        return self.latency_s + num_bytes / self.bytes_per_s
