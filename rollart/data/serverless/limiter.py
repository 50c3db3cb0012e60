"""How many calls an endpoint is given at once: as many as it answers without growing slow. Pure, but for the queue.

The limit follows the gradient of latency, as in Netflix' concurrency-limits (Gradient2): with `long` the slow and
`short` the fast average of latency,

    limit <- (1 - s) x limit + s x (limit x clamp(tolerance x long / short, 0.5, 1) + sqrt(limit))

so it grows by the square root while latency is flat and shrinks while latency rises. It moves only while it is the
limit that holds calls back. A refusal ("too many requests") takes a tenth off at once. Invariants: 1 <= limit <=
maximum; never more than the limit in use; calls are let through in order."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable

TOLERANCE = 2.0
"""Rewards of one kind differ in length: only a latency beyond this factor is a sign of load."""
SMOOTHING = 0.2
LONG, SHORT = 0.01, 0.2
"""Weights of a new sample in the two averages."""


class Limit:
    """The adaptive number. `maximum`: never beyond; `start`: where it begins."""

    def __init__(self, maximum: int, start: int) -> None:
        self.maximum = maximum
        self._value = float(min(start, maximum))
        self._long = self._short = 0.0
        self._samples = 0

    @property
    def value(self) -> int:
        """Calls at once."""
        return max(1, int(self._value))

    def observe(self, latency_s: float, in_use: int) -> None:
        """A call was answered after `latency_s`, while `in_use` calls ran."""
        self._samples += 1
        self._long += max(LONG, 1 / self._samples) * (latency_s - self._long)
        self._short += max(SHORT, 1 / self._samples) * (latency_s - self._short)
        if self._long > 2 * self._short:
            self._long *= 0.95  # what was slow once is forgotten
        if in_use < self._value / 2 or self._short <= 0:
            return
        gradient = max(0.5, min(1.0, TOLERANCE * self._long / self._short))
        target = self._value * gradient + math.sqrt(self._value)
        self._value = min(float(self.maximum), max(1.0, (1 - SMOOTHING) * self._value + SMOOTHING * target))

    def refused(self) -> None:
        """The endpoint turned a call away for being one too many."""
        self._value = max(1.0, self._value * 0.9)


class Gate:
    """Lets calls through in order, as many at once as `limit` says."""

    def __init__(self, limit: Callable[[], int]) -> None:
        self._limit = limit
        self.in_use = 0
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def enter(self) -> None:
        """Wait for a place; `leave` gives it back."""
        if self.in_use < self._limit() and not self._waiting:
            self.in_use += 1
            return
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(future)
        try:
            await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled():
                self.leave()
            raise

    def leave(self) -> None:
        """A call is over; those who wait go on, if the limit has room."""
        self.in_use -= 1
        while self._waiting and self.in_use < self._limit():
            if not (future := self._waiting.popleft()).done():
                self.in_use += 1
                future.set_result(None)
