"""What a request can begin with instead of computing it: keys and values kept between turns, and who begins alike.

Invariant: keys and values are a function of the tokens up to them, so any request that begins with the same tokens may
copy them. At most `max_tokens` are kept.
Left out: where those of running requests live (`slots.py`).

Shapes: L layers, 2 (keys, values), H key-value heads, T tokens, D head size.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Protocol, TypeVar

from torch import Tensor

from rollart.learn.packing import num_alike

LEAST_ALIKE = 8
"""Fewer tokens are computed as soon as they are copied from another request."""


@dataclass(frozen=True, slots=True)
class Kept:
    """Tokens with their keys and values."""

    tokens: list[int]
    saved_L2HTD: Tensor


class Prefixes:
    """Keys and values of trajectories between two turns; the least recently used go first beyond `max_tokens`."""

    def __init__(self, max_tokens: int) -> None:
        self.max_tokens, self.num_tokens = max_tokens, 0
        self._entries: OrderedDict[str, Kept] = OrderedDict()

    def put(self, trajectory_id: str, tokens: list[int], saved_L2HTD: Tensor) -> None:
        """Keep the values of `tokens`; evicts others, or keeps nothing when they alone are too many."""
        self.forget(trajectory_id)
        if not 0 < len(tokens) <= self.max_tokens:
            return
        self._entries[trajectory_id] = Kept(tokens, saved_L2HTD)
        self.num_tokens += len(tokens)
        while self.num_tokens > self.max_tokens:
            self.forget(next(iter(self._entries)))

    def match(self, trajectory_id: str, tokens: list[int]) -> tuple[Kept | None, int]:
        """What is kept for a trajectory, and how many of `tokens` it serves, always leaving one to compute."""
        kept = self._entries.get(trajectory_id)
        served = 0 if kept is None else min(num_alike(kept.tokens, tokens), len(tokens) - 1)
        return (kept, served) if served else (None, 0)

    def latest(self, count: int) -> Iterator[Kept]:
        """The last `count` that were put, newest first."""
        return islice(reversed(self._entries.values()), count)

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


class Donor(Protocol):
    """Who has keys and values of its tokens."""

    @property
    def tokens(self) -> list[int]: ...


D = TypeVar("D", bound=Donor)


def most_alike(tokens: list[int], donors: Iterable[tuple[D, int]], found: int) -> tuple[D | None, int]:
    """Who has the most of what `tokens` begin with, and how much, always leaving one to compute.

    `donors`: each with how many of its tokens count. None, and `found`, when nobody has at least LEAST_ALIKE more.
    """
    best: D | None = None
    least = found + LEAST_ALIKE
    for donor, known in donors:
        most = min(known, len(tokens) - 1)
        if least <= most and donor.tokens[least - 1] == tokens[least - 1] and donor.tokens[:least] == tokens[:least]:
            best, found = donor, min(num_alike(donor.tokens, tokens), most)
            if (least := found + 1) == len(tokens):
                break
    return best, found
