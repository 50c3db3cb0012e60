"""How many groups more than a batch needs are in flight: as many as keep the trainer from waiting, and no more. PURE.

With slots for alpha + 1 batches, and no more, a trainer waits for the slowest of few groups while engines have room
(`rollout.extra_groups = 0`, paper section 5). More groups in flight shorten that wait, and cost nothing as long as
nobody queues for it. What is redundant for a batch is kept for the next one, so that nothing is ended for being slow,
and the lengths that are trained on stay those of the workload; what grows stale is the price, and it is bounded.

    raise   the trainer waited, and the engines have room
    lower   requests queue for a slot; or more has grown stale than `MOST_LOST` of what was trained; or the trainer
            does not wait at all

Invariant: 0 <= `extra` <= `most`. What this file leaves out: admission itself (`group_book.py`).
"""

from __future__ import annotations

WAITS = 0.05
"""Share of a step that the trainer waits for its batch, from which more groups are worth it."""
BUSY = 0.9
"""Share of the engines' slots that are taken, from which requests queue."""
MOST_LOST = 0.75
"""Stale trajectories per trained one, at most."""
STEPS = 8
"""A change is this part of a batch."""


class Pacing:
    """`extra`: groups in flight beyond the slots that alpha asks for; it changes by an eighth of a batch per batch."""

    def __init__(self, groups_per_batch: int, most: int) -> None:
        self.extra = 0
        self.most = most
        self._step = max(1, groups_per_batch // STEPS)

    @property
    def held_back(self) -> int:
        """Groups that might be in flight beyond them, and are not."""
        return self.most - self.extra

    def batch(self, waited: float, busy: float, lost: float) -> int:
        """A batch was taken: the new `extra`.

        waited: share of the step that the trainer waited for it; busy: share of the engines' slots that are taken;
        lost: trajectories that grew stale per trained one. Each since the batch before.
        """
        if busy >= BUSY or lost > MOST_LOST or waited <= 0:
            self.extra = max(0, self.extra - self._step)
        elif waited > WAITS:
            self.extra = min(self.most, self.extra + self._step)
        return self.extra
