"""Environments and rewards as users might write them, most of them badly: named `tests.e2e.hostile:NAME` in configs.

`seen` counts what happened, for tests that run everything in one process.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import random
import signal
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any, Literal

from rollart.types import RewardRequest

seen: Counter[str] = Counter()
_lock = threading.Lock()


def count(kind: str) -> int:
    """One more of `kind`; how many there were."""
    with _lock:
        seen[kind] += 1
        return seen[kind]


Fault = Literal["hang", "interrupt", "raise", "exit", "none", "nan", "slow"]


class Friendly:
    """One turn, rewarded by whether the answer's length is even: something that differs within every group."""

    def reset(self, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        if not getattr(self, "is_open", False):
            self.is_open = True
            count("opened")
        return f"say something {(seed or 0) % 10}", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        return "", float(len(action) % 2 == 0), True, False, {}

    def close(self) -> None:
        count("closed")


class Breakable(Friendly):
    """Fails while there is a file `gate`."""

    def __init__(self, gate: str) -> None:
        self._gate = Path(gate)

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        if self._gate.exists():
            raise RuntimeError("it is broken")
        return super().step(action)


class Held(Friendly):
    """Answers nothing while there is a file `gate`, so that a test can do something to a run before it goes on."""

    def __init__(self, gate: str) -> None:
        self._gate = Path(gate)

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        time.sleep(0.2)
        while self._gate.exists():
            time.sleep(0.05)
        return super().step(action)


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
        if count(f"calls of {kind}") % self._every:
            return False
        count(kind)
        return True

    def _misbehave(self, answer: tuple[Any, ...]) -> Any:
        match self._fault:
            case "hang":
                threading.Event().wait()
            case "interrupt":
                time.sleep(1.0)  # until the run waits for this call
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
    """Fills the file system of `place` at the resets whose numbers are in `fill`, makes room at those in `free`.

    Between the two it fills at every reset, for what others had begun to write and gave up makes room, too.
    """

    _resets = itertools.count(1)
    _one_at_a_time = threading.Lock()

    def __init__(self, place: str, fill: list[int], free: list[int]) -> None:
        self._ballast, self._fill_at, self._free_at = Path(place) / "ballast", fill, free

    def reset(self, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        with self._one_at_a_time:
            number = next(self._resets)
            if number in self._free_at:
                self._ballast.unlink()
            elif max(each for each in [0, *self._fill_at, *self._free_at] if each <= number) in self._fill_at:
                self._fill()
        return super().reset(seed)

    def _fill(self) -> None:
        with self._ballast.open("ab", buffering=0) as file, contextlib.suppress(OSError):
            while file.write(bytes(4096)):
                pass


def _every_third(request: RewardRequest) -> bool:
    return count(request.task) % 3 == 0


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


class Deadly(Friendly):
    """Takes its whole process along."""

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        os.kill(os.getpid(), signal.SIGKILL)
        return super().step(action)
