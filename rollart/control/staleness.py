"""How old a group may be: the asynchronous bound alpha, also a fractional one. PURE.

Invariant: of the groups that `stale` does not name, at most `quota` have age `whole + 1`, and none is older.
What it leaves out: what becomes of a stale group (`group_book.py`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TypeVar

from msgspec import Struct

K = TypeVar("K")


class Staleness(Struct, frozen=True):
    """The bound of a run (paper section 5). A group's age is the version of the workers minus its oldest start.

    >>> half = Staleness.of(alpha=1.5, groups_per_batch=4)
    >>> half.whole, half.quota, half.oldest
    (1, 2, 2)
    >>> half.stale([("a", 2), ("b", 0), ("c", 2), ("d", 2), ("e", 3)])
    ['d', 'e']
    """

    whole: int
    """Every group may be this old."""
    quota: int
    """Groups of a batch that may be one version older."""

    @classmethod
    def of(cls, alpha: float, groups_per_batch: int) -> Staleness:
        """Split alpha: its whole part holds for all groups, its fraction for that share of a batch."""
        whole = math.floor(alpha)
        return cls(whole, math.floor((alpha - whole) * groups_per_batch + 1e-9))

    @property
    def oldest(self) -> int:
        """No trajectory that is older can still be trained."""
        return self.whole + (self.quota > 0)

    def stale(self, ages: Iterable[tuple[K, int]]) -> list[K]:
        """The keys that are too old; those that come first have the first right to the quota."""
        left, stale = self.quota, []
        for key, age in ages:
            if age <= self.whole:
                continue
            if age == self.whole + 1 and left:
                left -= 1
            else:
                stale.append(key)
        return stale
