"""Where keys and values live: one buffer for the requests that run, exact copies for trajectories between turns.

Invariant: running requests occupy slots 0..n-1 without gaps, so that attention reads views of the buffer and idle
trajectories cost no arithmetic. Everything in the buffer is finite: a slot is wiped when its request is dropped, since
a masked NaN would still poison the attention of the slot's next owner.
Left out: which tokens the values belong to (`embedded.py`) and how they are read (`attention.py`).

Shapes: L layers, 2 (keys, values), S slots, H key-value heads, W width in tokens, D head size.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass

import torch
from torch import Tensor

FIRST_WIDTH = 64


class Slots:
    """The buffer of the running requests, grown by doubling up to `max_slots` x `max_width`."""

    def __init__(
        self,
        num_layers: int,
        num_heads: int,
        head_dim: int,
        max_slots: int,
        max_width: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.num_heads, self.max_slots, self.max_width = num_heads, max_slots, max_width
        self.zero = torch.tensor(0.0, dtype=dtype, device=device)
        self.minus_infinity = torch.tensor(-math.inf, dtype=dtype, device=device)
        self.places_W = torch.arange(max_width, device=device)
        self._use(torch.zeros(num_layers, 2, 0, num_heads, 0, head_dim, dtype=dtype, device=device))

    def _use(self, buffer_L2SHWD: Tensor) -> None:
        self.buffer_L2SHWD = buffer_L2SHWD
        self.heads_H = torch.arange(self.num_heads, device=buffer_L2SHWD.device) * self.width
        self.keys_SHWD = [layer[0] for layer in buffer_L2SHWD]
        self.values_SHWD = [layer[1] for layer in buffer_L2SHWD]

    @property
    def num_slots(self) -> int:
        """Slots allocated."""
        return self.buffer_L2SHWD.shape[2]

    @property
    def width(self) -> int:
        """Tokens allocated per slot."""
        return self.buffer_L2SHWD.shape[4]

    def reserve(self, num_slots: int, width: int) -> None:
        """Make room for `num_slots` slots of `width` tokens."""
        if num_slots <= self.num_slots and width <= self.width:
            return
        old = self.buffer_L2SHWD
        slots = _grown(self.num_slots, num_slots, 1, self.max_slots)
        width = _grown(self.width, width, FIRST_WIDTH, self.max_width)
        new = old.new_zeros(*old.shape[:2], slots, old.shape[3], width, old.shape[5])
        new[:, :, : self.num_slots, :, : self.width] = old
        self._use(new)

    def save(self, slot: int, num_tokens: int) -> Tensor:
        """A copy of the slot's first `num_tokens` tokens, [L, 2, H, num_tokens, D]."""
        return self.buffer_L2SHWD[:, :, slot, :, :num_tokens].clone(memory_format=torch.contiguous_format)

    def load(self, slot: int, saved_L2HTD: Tensor, num_tokens: int) -> None:
        """Write the first `num_tokens` tokens of what `save` returned into a slot, for which it makes room."""
        self.reserve(slot + 1, num_tokens)
        self.buffer_L2SHWD[:, :, slot, :, :num_tokens] = saved_L2HTD[:, :, :, :num_tokens]

    def copy(self, source: int, target: int, num_tokens: int) -> None:
        """Write the first `num_tokens` tokens of a slot into another, for which it makes room."""
        self.reserve(target + 1, num_tokens)
        self.buffer_L2SHWD[:, :, target, :, :num_tokens] = self.buffer_L2SHWD[:, :, source, :, :num_tokens]

    def wipe(self, slot: int) -> None:
        """Zero a slot."""
        self.buffer_L2SHWD[:, :, slot].zero_()


def _grown(have: int, need: int, first: int, most: int) -> int:
    if need <= have:
        return have
    size = max(have, first)
    while size < need:
        size *= 2
    return min(size, most)


@dataclass(frozen=True, slots=True)
class _Entry:
    tokens: list[int]
    saved_L2HTD: Tensor


class Prefixes:
    """Keys and values of trajectories between two turns; the least recently used go first beyond `max_tokens`."""

    def __init__(self, max_tokens: int) -> None:
        self.max_tokens, self.num_tokens = max_tokens, 0
        self._entries: OrderedDict[str, _Entry] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def put(self, trajectory_id: str, tokens: list[int], saved_L2HTD: Tensor) -> None:
        """Keep the values of `tokens`; evicts others, or keeps nothing when they alone are too many."""
        self.forget(trajectory_id)
        if not 0 < len(tokens) <= self.max_tokens:
            return
        self._entries[trajectory_id] = _Entry(tokens, saved_L2HTD)
        self.num_tokens += len(tokens)
        while self.num_tokens > self.max_tokens:
            self.forget(next(iter(self._entries)))

    def match(self, trajectory_id: str, tokens: list[int]) -> int:
        """How many of `tokens` a trajectory's values serve, always leaving one to compute."""
        entry = self._entries.get(trajectory_id)
        return 0 if entry is None else min(num_alike(entry.tokens, tokens), len(tokens) - 1)

    def take(self, trajectory_id: str) -> Tensor | None:
        """Hand over a trajectory's values, if any are kept."""
        entry = self._entries.get(trajectory_id)
        self.forget(trajectory_id)
        return None if entry is None else entry.saved_L2HTD

    def forget(self, trajectory_id: str) -> None:
        """Drop a trajectory's values, if any are kept."""
        entry = self._entries.pop(trajectory_id, None)
        if entry is not None:
            self.num_tokens -= len(entry.tokens)

    def clear(self) -> None:
        """Drop everything."""
        self._entries.clear()
        self.num_tokens = 0

    def check(self) -> None:
        """Assert the invariant."""
        entries = self._entries.values()
        assert self.num_tokens == sum(len(entry.tokens) for entry in entries) <= self.max_tokens
        assert all(entry.saved_L2HTD.shape[3] == len(entry.tokens) for entry in entries)


def num_alike(first: list[int], second: list[int]) -> int:
    """Tokens that both begin with."""
    shorter = min(len(first), len(second))
    if first[:shorter] == second[:shorter]:
        return shorter
    return next(i for i in range(shorter) if first[i] != second[i])
