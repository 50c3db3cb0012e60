"""Reward functions of the end-to-end tests. What they do depends on the trajectory alone, as they keep nothing."""

from __future__ import annotations

import os
import time
import zlib

from rollart.types import RewardRequest


def friendly(request: RewardRequest) -> float:
    return float(len(request.responses[0]) % 2)


def moody(request: RewardRequest) -> float:
    mood = _mood(request) % 12
    if mood == 0:
        time.sleep(600)
    if mood == 1:
        raise KeyError("no such answer")
    return float(mood)


def deadly(request: RewardRequest) -> float:
    if _mood(request) % 12 == 0:
        os.kill(os.getpid(), 9)
    return 1.0


def of_groups(requests: list[RewardRequest]) -> list[float]:
    order = sorted(range(len(requests)), key=lambda index: requests[index].responses[0])
    return [float(order.index(index)) for index in range(len(requests))]


def _mood(request: RewardRequest) -> int:
    return zlib.crc32(request.responses[0].encode())
