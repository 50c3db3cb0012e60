"""Environments and rewards as users might write them, most of them badly: named `tests.e2e.hostile:NAME` in configs.

`seen` counts what happened, for tests that run everything in one process.
"""

from __future__ import annotations

import itertools
import math
import os
import random
import signal
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any, ClassVar, Literal

from rollart.types import RewardRequest

seen: Counter[str] = Counter()

Fault = Literal["hang", "interrupt", "raise", "exit", "none", "nan", "slow"]


class Friendly:
    """One turn, rewarded by whether the answer's length is even: something that differs within every group."""

    def reset(self, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        return f"say something {(seed or 0) % 10}", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        return "", float(len(action) % 2 == 0), True, False, {}


class Speechless(Friendly):
    """Rewards nothing, says nothing, and shows by example how to answer nothing."""

    def reset(self, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        return "", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        return "", 0.0, True, False, {}

    def sample_action(self, rng: random.Random) -> str:
        return ""


class Shouting:
    """Two turns, each worth up to 1/2 for an answer in capital letters: learned in a few steps, even from nothing."""

    def reset(self, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        self._turn = 0
        return f"shout {(seed or 0) % 10}", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self._turn += 1
        share = sum("A" <= char <= "Z" for char in action) / max(1, len(action))
        return "again", min(1.0, share / 0.4) / 2, self._turn == 2, False, {}


class Faulty(Friendly):
    """Does `fault` in every `every`-th call of `where`, counted over all environments of the process."""

    calls: ClassVar[Counter[str]] = Counter()
    _lock = threading.Lock()

    def __init__(self, fault: Fault, where: Literal["reset", "step"] = "step", every: int = 1) -> None:
        self._fault, self._where, self._every = fault, where, every

    def reset(self, seed: int | None = None) -> Any:
        answer = super().reset(seed)
        return self._misbehave(answer) if self._where == "reset" and self._is_due() else answer

    def step(self, action: str) -> Any:
        answer = super().step(action)
        return self._misbehave(answer) if self._where == "step" and self._is_due() else answer

    def _is_due(self) -> bool:
        kind = f"{self._fault} in {self._where}"
        with self._lock:
            self.calls[kind] += 1
            due = self.calls[kind] % self._every == 0
            seen[kind] += due
        return due

    def _misbehave(self, answer: tuple[Any, ...]) -> Any:
        match self._fault:
            case "hang":
                threading.Event().wait()
            case "interrupt":
                signal.raise_signal(signal.SIGINT)
                threading.Event().wait()
            case "raise":
                raise KeyError("no such page")
            case "exit":
                raise SystemExit(1)
            case "none":
                return None
            case "nan":
                return (answer[0], math.nan, *answer[2:])
        time.sleep(0.2)
        return answer


class FillsDisk(Friendly):
    """Fills the file system of `place` before its `first`-th reset and makes room again before its `last`-th."""

    _resets = itertools.count(1)

    def __init__(self, place: str, first: int, last: int) -> None:
        self._ballast, self._first, self._last = Path(place) / "ballast", first, last

    def reset(self, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        number = next(self._resets)
        if number == self._first:
            self._fill()
        elif number == self._last:
            self._ballast.unlink()
        return super().reset(seed)

    def _fill(self) -> None:
        with self._ballast.open("wb", buffering=0) as file:
            for size in (4096, 1):
                try:
                    while True:
                        file.write(bytes(size))
                except OSError:
                    os.sync()


def _every_third(request: RewardRequest) -> bool:
    with Faulty._lock:
        seen[request.task] += 1
        return seen[request.task] % 3 == 0


def raises(request: RewardRequest) -> float:
    """A reward that raises now and then."""
    if _every_third(request):
        raise ZeroDivisionError("no points")
    return request.env_reward


def not_a_number(request: RewardRequest) -> float:
    """A reward that is NaN now and then."""
    return math.nan if _every_third(request) else request.env_reward


def hopeless(request: RewardRequest) -> float:
    """A reward that always raises."""
    raise ZeroDivisionError("no points")
