"""The five schedules of the paper's evaluation (section 7) as values of one record on one code path.

The training loop reads these fields and nothing else, so a comparison of schedules is one config line. What this file
leaves out: how a field is obeyed (see `control/training_loop.py` and `control/rollout_scheduler.py`).
"""

from __future__ import annotations

from typing import Literal

from msgspec import Struct


class Schedule(Struct, frozen=True):
    """How rollout and training take turns.

    overlap: train_step runs while rollout goes on; otherwise the loop waits for it, publishes and updates first.
    admission: "continuous" admits a group as soon as a slot is free; "iteration" admits one batch after each update.
    recheck: "turn" aborts a trajectory as soon as it is too old, checked at every turn and every update; "start"
        checks only when a trajectory starts (get_batch evicts what is too old in either case).
    lockstep: environments of all running trajectories step together, as a batch.
    async_reward: score each trajectory as it ends; otherwise when all trajectories of the iteration have ended.
    alpha: the bound that the schedule implies, or None where the config decides.
    """

    name: str
    overlap: bool
    admission: Literal["iteration", "continuous"]
    recheck: Literal["turn", "start"]
    lockstep: bool = False
    async_reward: bool = True
    alpha: float | None = None


SCHEDULES: dict[str, Schedule] = {
    schedule.name: schedule
    for schedule in (
        Schedule("sync", False, "iteration", "turn", lockstep=True, async_reward=False, alpha=0.0),
        Schedule("sync_plus", False, "iteration", "turn", alpha=0.0),
        Schedule("one_off", True, "iteration", "turn", alpha=1.0),
        Schedule("areal", True, "continuous", "start"),
        Schedule("rollart", True, "continuous", "turn"),
    )
}
