"""Content held out for evaluation: what an episode shows to an evaluation is never shown to training.

Seeds alone do not do that: a small family of episodes comes up again under other seeds. So each content belongs to one
side, by its own text, and a seed draws until it has one of its side. Invariant: the same seed draws the same content,
everywhere. What this file leaves out: tasks whose content comes from elsewhere, which hold out seeds only.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable
from typing import TypeVar

from rollart.types import HELD_OUT

T = TypeVar("T")

SHARE = 8
"""One content in so many belongs to evaluation."""
ATTEMPTS = 1000
"""Draws after which a family is too small to have two sides."""


def draw(seed: int | None, make: Callable[[int | None], T], text: Callable[[T], str] = str) -> T:
    """What `make(seed)` makes, or, if its text belongs to the other side, what further seeds drawn from it make.

    Seeds from `HELD_OUT` on are evaluation's, those below are training's; without a seed anything goes.
    """
    made = make(seed)
    if seed is None:
        return made
    others = random.Random(seed)
    for _ in range(ATTEMPTS):
        if is_held_out(text(made)) == (seed >= HELD_OUT):
            break
        made = make(others.getrandbits(31))
    return made


def is_held_out(text: str) -> bool:
    """Whether a content belongs to evaluation."""
    return zlib.crc32(text.encode()) % SHARE == 0
